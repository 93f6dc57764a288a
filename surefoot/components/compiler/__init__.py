"""The compiler: what is compiled, what that cost, and why again."""

from surefoot.components.compiler.regions import Compiled, compile_regions
from surefoot.components.compiler.steward import Steward

__all__ = ["Compiled", "Steward", "compile_regions"]
