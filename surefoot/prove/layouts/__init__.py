"""Does a task compute the same under every layout of its ranks?"""

from surefoot.prove.layouts.compare import Compared
from surefoot.prove.layouts.verify import Verdict, verify_layouts

__all__ = ["Compared", "Verdict", "verify_layouts"]
