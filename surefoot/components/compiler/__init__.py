"""The compiler: what is compiled, what that cost, and why again."""

from surefoot.components.compiler.regions import Compiled, compile_regions
from surefoot.components.compiler.steward import Compilation, Steward

__all__ = ["Compilation", "Compiled", "Steward", "compile_regions"]
