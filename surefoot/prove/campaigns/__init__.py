"""Fault campaigns: series of trials with killed processes, damaged files and full disks."""

from functools import partial

from surefoot.prove.campaigns import damage, failing, forge, kills, power, ranks, strace
from surefoot.prove.campaigns.outcome import Campaign

CAMPAIGNS: tuple[Campaign, ...] = (
    Campaign(
        case="F01",
        title="kill -9 at any time, every second one inside a save",
        few=20,
        trial=partial(kills.kill, places=kills.ANYWHERE, depth=1),
    ),
    Campaign(
        case="F02",
        title="kill -9 at every system call of a save and of the retention after it",
        few=12,
        trial=kills.kill_at_call,
        sweep=lambda workshop: len(kills.find_calls(workshop)),
        missing=strace.missing,
    ),
    Campaign(
        case="F03",
        title="kill -9 in the first and last save, load, retention, and again while it recovers",
        few=10,
        trial=partial(kills.kill, places=kills.PHASES, depth=kills.DEPTH),
    ),
    Campaign(
        case="F24",
        title="SIGTERM with 30, 5 and 0 s of grace, or twice; Ctrl-C",
        few=10,
        trial=kills.preempt,
    ),
    Campaign(
        case="F04",
        title="power cut at any moment of a run",
        few=400,
        trial=power.cut_power,
        missing=strace.missing,
    ),
    Campaign(
        case="F29",
        title="2 to 8 launchers in one folder; a killed owner; a lost lock",
        few=6,
        trial=kills.launch_rivals,
    ),
    Campaign(
        case="F05",
        title="one flipped bit in any file of a run",
        few=200,
        trial=partial(damage.damage, kinds=damage.FLIPPED),
    ),
    Campaign(
        case="F06",
        title="files cut, emptied, zeroed, swapped, spliced, doubled, lost, added, linked",
        few=50,
        trial=partial(damage.damage, kinds=damage.KINDS),
    ),
    Campaign(
        case="F06-run",
        title="a checkpoint replaced by one of a different run",
        few=4,
        trial=damage.take_another_run_s_commit,
    ),
    Campaign(
        case="M01",
        title="malicious checkpoints with valid digests, and a pickle in place of every file",
        few=100,
        trial=forge.open_a_hostile_commit,
    ),
    Campaign(
        case="F07",
        title="a disk with room for 0, 5 ... 100 % of a save",
        few=6,
        trial=failing.fill_the_disk,
        missing=failing.cannot_mount,
    ),
    Campaign(
        case="F08",
        title="each call of a save ends with ENOSPC, EDQUOT, EIO",
        few=12,
        trial=failing.refuse_a_call,
        sweep=lambda workshop: len(failing.ERRORS) * len(failing.find_calls(workshop)),
        missing=strace.missing,
    ),
    Campaign(
        case="F09",
        title="a folder that is or becomes read-only",
        few=3,
        trial=failing.turn_read_only,
        missing=failing.cannot_mount,
    ),
    Campaign(
        case="F10",
        title="fsync that takes longer than training",
        few=1,
        trial=failing.slow_down,
        missing=strace.missing,
    ),
    Campaign(
        case="F26",
        title="runs of 1, 2 and 4 ranks, killed and resumed on a different number of ranks",
        few=3,
        trial=ranks.change_size,
        missing=ranks.missing,
    ),
    Campaign(
        case="F12",
        title="NaN or infinity in one sample, on 2 and 4 ranks",
        few=4,
        trial=ranks.poison_a_sample,
    ),
    Campaign(
        case="F13",
        title="NaN or infinity in a loss, a gradient or a BatchNorm buffer of one rank",
        few=3,
        trial=ranks.poison_a_step,
    ),
    Campaign(
        case="F20",
        title="SIGSTOP of one of 2 or 4 ranks at any time",
        few=3,
        trial=ranks.stop_a_rank,
        missing=ranks.missing,
    ),
    Campaign(
        case="F23",
        title="kill -9 of the supervisor of 2 or 4 ranks",
        few=3,
        trial=ranks.kill_the_supervisor,
        missing=ranks.missing,
    ),
    Campaign(
        case="F01-loop",
        title="a rank that is killed before every commit",
        few=2,
        trial=ranks.kill_each_attempt,
    ),
)
