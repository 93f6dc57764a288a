"""An all-reduce by hand: the sum over all ranks, made of messages to the right neighbour alone.

python examples/ring_all_reduce.py 4    # ranks; 2 by default

The ranks stand in a ring, and each cuts its tensor into as many pieces as there are ranks.

    first half, reduce-scatter: n - 1 times each rank sends a piece on and adds what comes from the
                                left to its own
    second half, all-gather:    n - 1 times each rank sends on a piece that is whole, and keeps what
                                comes

Three ranks hold a, b and c, and each piece goes one place to the right in each round of the first
half, beginning with piece r on rank r:

    rank 0   a0  a1  a2          .      .    a2+c2             .         a1+b1+c1     .
    rank 1   b0  b1  b2    ->  a0+b0    .      .      ->       .            .      a2+b2+c2
    rank 2   c0  c1  c2          .    b1+c1    .            a0+b0+c0        .         .

Each rank sends every piece but one in each half: 2 (n - 1) / n times the size of the tensor, which
is hardly more for a thousand ranks than for four, and is the least there is (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms"). What grows with the ranks is the number of
messages, 2 (n - 1), and with it the latency: so gradients go in buckets, and not one by one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> int:
    """Put the sum over all ranks in the place of `tensor`, the same bits on each.

    Gives the bytes that this rank sent.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    # views, as even as can be: some hold one number more, and some none at all
    pieces = flat.tensor_split(size)
    sent = 0
    for number in range(size - 1):  # reduce-scatter
        going, coming = pieces[(rank - number) % size], pieces[(rank - number - 1) % size]
        arrived = torch.empty_like(coming)
        sent += pass_on(going, arrived)
        coming += arrived
    for number in range(size - 1):  # all-gather
        going, coming = pieces[(rank + 1 - number) % size], pieces[(rank - number) % size]
        sent += pass_on(going, coming)
    return sent


def pass_on(going: Tensor, coming: Tensor) -> int:
    """Send `going` to the right while `coming` is filled from the left; gives the bytes sent.

    Ranks that all sent first would wait for ever.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(going, (rank + 1) % size) if going.numel() else None
    if coming.numel():
        dist.recv(coming, (rank - 1) % size)
    if sending is not None:
        sending.wait()
    return going.numel() * going.element_size()


def compare(rank: int, size: int, meeting: str) -> None:
    """What each rank does: sum numbers of its own by hand, and with what torch has."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    by_hand = torch.randn(
        1_000_003, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    built_in = by_hand.clone()
    sent = ring_all_reduce(by_hand)
    dist.all_reduce(built_in)
    num_bytes = by_hand.numel() * by_hand.element_size()
    worst = float((by_hand - built_in).abs().max())
    assert worst < 1e-13, worst  # another order of summation
    if rank == 0:
        print(
            f"{size} ranks: off the built-in by {worst:.1e}; "
            f"{sent / num_bytes:.6f} times the size sent",
            end="",
        )
        print(f", 2 (n - 1) / n is {2 * (size - 1) / size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            compare, args=(num_ranks, str(Path(folder) / "meeting")), nprocs=num_ranks
        )
