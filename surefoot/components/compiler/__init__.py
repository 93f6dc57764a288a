"""torch.compile: the compiled regions of a model, the cost of compiling them, and the reasons for
recompilation."""

from surefoot.components.compiler.layout import lay_channels_last
from surefoot.components.compiler.regions import (
    CompiledFunction,
    CompiledRegions,
    compile_function,
    compile_regions,
)
from surefoot.components.compiler.steward import Steward

__all__ = [
    "CompiledRegions",
    "CompiledFunction",
    "Steward",
    "compile_function",
    "compile_regions",
    "lay_channels_last",
]
