"""Choice of the dtype of the forward and backward passes.

Weights, gradients and optimizer state stay in fp32. The number formats that a device supports are
queried. A format that a device lacks is rejected, except that a CPU may compute 16-bit formats in
software, which is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from surefoot.contract.spec import PrecisionTable
from surefoot.core.errors import InputError, SpecError
from surefoot.core.hardware import find_machine, find_processor_flags

if TYPE_CHECKING:
    from surefoot.components.precision.scaler import LossScaler

Compute = Literal["fp32", "tf32", "bf16", "fp16", "float8"]
HALVES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = {**HALVES, "float8": torch.bfloat16}  # float8 applies to linear layers only
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and ARM, as /proc/cpuinfo names them
FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp"}
SINCE = {"fp16": "Volta (2017)", "float8": "Ada and Hopper (2022)"}  # the others: Ampere (2020)
INSTEAD = {"float8": "precision.emulate = true gives its numbers without them, slowly"}


@dataclass(frozen=True)
class FormatSupport:
    """Number formats that a device supports in hardware, in addition to fp32.

    `kind` is "cpu" or "cuda", and `name` is the name of the device.
    """

    kind: str
    name: str
    formats: frozenset[str]


@dataclass(frozen=True)
class Policy:
    """Precision of the forward and backward passes.

    `why` is the reason for the choice. `context` returns a new context for a forward pass. `scaler`
    is the loss scaler for fp16, and None for other formats.
    """

    compute: Compute
    why: str
    context: Callable[[], AbstractContextManager[Any]]
    scaler: LossScaler | None = None


PLAIN = Policy("fp32", "as the spec says", nullcontext)


def find_units(device: torch.device) -> FormatSupport:
    """Return the number formats that `device` supports in hardware.

    torch reports those of a GPU. Those of a CPU are derived from the CPU flags of the operating
    system.
    """
    if device.type != "cuda":
        flags = find_processor_flags()
        found = {
            name for name, known in (("bf16", BF16_FLAGS), ("fp16", FP16_FLAGS)) if flags & known
        }
        return FormatSupport("cpu", find_machine().processor, frozenset(found))
    with torch.cuda.device(device):
        capability = torch.cuda.get_device_capability()
        bf16, tf32 = (
            torch.cuda.is_bf16_supported(including_emulation=False),
            torch.cuda.is_tf32_supported(),
        )
        rest = (("fp16", capability >= (7, 0)), ("float8", capability >= (8, 9)))
        found = {name for name, has in (("bf16", bf16), ("tf32", tf32), *rest) if has}
        return FormatSupport("cuda", torch.cuda.get_device_name(), frozenset(found))


def choose(wanted: str, units: FormatSupport, *, emulate: bool = False) -> tuple[Compute, str]:
    """Return the precision to use on a device, and the reason.

    "auto" chooses bf16 if the device supports it in hardware, else fp16 if a GPU supports that,
    else fp32. Any other `wanted` is returned itself. Raises SpecError for a format that the device
    does not support, unless it is emulated or is a 16-bit format on a CPU.

    >>> choose("auto", FormatSupport("cuda", "Tesla V100", frozenset({"fp16"})))
    ('fp16', 'auto: Tesla V100 has units for fp16 and none for bf16; with a loss scale')
    """
    if wanted == "auto":
        return _best(units)
    if emulate:
        return cast("Compute", wanted), "as the spec says; emulated: its numbers, and not its speed"
    if wanted not in units.formats and wanted != "fp32":
        if units.kind == "cpu" and wanted in HALVES:
            return cast(
                "Compute", wanted
            ), f"as the spec says; {units.name} has no units for {wanted}: it will not be faster"
        reason, hint = f"{wanted} is a format of a GPU's tensor cores", "use another: fp32, bf16"
        if wanted != "tf32" or units.kind != "cpu":
            reason = f"it has no units for {wanted}"
            hint = (
                f"GPUs have them since {SINCE.get(wanted, 'Ampere (2020)')}; "
                f"{INSTEAD.get(wanted, 'auto takes the best there is')}"
            )
        raise SpecError(
            f"precision.compute is {wanted!r}, which {units.name} lacks: {reason}", hint=hint
        )
    return cast("Compute", wanted), "as the spec says"


def _best(units: FormatSupport) -> tuple[Compute, str]:
    if "bf16" in units.formats:
        return "bf16", f"auto: {units.name} has units for bf16, whose range is that of fp32"
    if units.kind == "cuda" and "fp16" in units.formats:
        return "fp16", f"auto: {units.name} has units for fp16 and none for bf16; with a loss scale"
    return (
        "fp32",
        (
            f"auto: {units.name} has no units for 16 bits that need no loss scale; "
            "they would not be faster"
        ),
    )


def build(table: PrecisionTable, device: torch.device, *, scales_on_device: bool = False) -> Policy:
    """Return the precision policy that the [precision] table of a spec selects on `device`.

    If the device decides whether to apply an update, `scales_on_device` stores the loss scale there
    too. Raises SpecError for a format that the device does not support.
    """
    compute, why = choose(table.compute, find_units(device), emulate=table.emulate)
    scaler = None
    if compute == "fp16":
        from surefoot.components.precision.scaler import LossScaler

        scaler = LossScaler(
            table.init_scale,
            growth_interval=table.growth_interval,
            floor=table.min_scale,
            device=device if scales_on_device else None,
        )
    return Policy(compute, why, compute_context(compute, device), scaler)


def compute_context(
    compute: Compute, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a factory of contexts for the forward pass: autocast, or a null context for 32 bits.

    The first call for autocast on a CPU changes autocast in the whole process: from then on, it
    computes softmax, norms and sums in fp32 on a CPU too, as it does on a GPU.

    Args:
        compute: The number format. "tf32" also requires `set_products`, and "float8" the conversion
            of the layers by `to_float8`. "auto" is not accepted, but `choose` resolves it.
        device: The device of the forward pass.

    Raises:
        InputError: For any other format.
    """
    if compute not in get_args(Compute):
        hint = (
            "for the best of a device: choose('auto', find_units(device))[0]"
            if str(compute) == "auto"
            else None
        )
        raise InputError(
            f"the precision {compute!r} is none of {', '.join(get_args(Compute))}", hint=hint
        )
    if compute not in AUTOCAST:
        return nullcontext
    if device.type == "cpu":
        from surefoot.components.precision.wide import register_fp32_autocast_on_cpu

        register_fp32_autocast_on_cpu()
    return lambda: torch.autocast(device.type, dtype=AUTOCAST[compute])


def set_products(compute: str) -> Callable[[], None]:
    """Turn tf32 matmuls and convolutions on a GPU on for "tf32", and off for any other `compute`.

    Returns a function that restores the settings. torch's older switches (`cudnn.allow_tf32`,
    `set_float32_matmul_precision`) are set too. If they disagreed with the newer switches, reading
    them would raise an error; `torch.backends.cudnn.flags()` reads them, for example around the CTC
    loss of transformers.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    switches, is_tf32 = (cuda.matmul, cudnn.conv, cudnn.rnn), compute == "tf32"
    before = [each.fp32_precision for each in switches]
    of_cudnn, of_products = _read(lambda: cudnn.allow_tf32), None
    if (cuda.matmul.fp32_precision == "tf32") != is_tf32:
        of_products = _read(torch.get_float32_matmul_precision)
        torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    cudnn.allow_tf32 = is_tf32

    def put_back() -> None:
        if of_products is not None:
            torch.set_float32_matmul_precision(of_products)
        if of_cudnn is not None:
            cudnn.allow_tf32 = of_cudnn
        for each, value in zip(switches, before, strict=True):
            if each.fp32_precision != value:
                each.fp32_precision = value

    for each in switches:
        if (each.fp32_precision == "tf32") != is_tf32:
            each.fp32_precision = "tf32" if is_tf32 else "ieee"
    return put_back


def _read(switch: Callable[[], Any]) -> Any:
    """Return the value of an older switch of torch; None if it disagrees with the newer ones."""
    try:
        return switch()
    except RuntimeError:
        return None
