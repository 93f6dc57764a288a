"""placeholder"""
from __future__ import annotations
import math
from dataclasses import dataclass
from typing import Any
@dataclass(frozen=True)
class ScheduleSettings:
    name: str = "cosine"
    warmup: str = "0 steps"
    floor: float = 0.0
class Built:
    def __init__(self, s, total, ts): self.s=s; self.total=total or 1; self.w=ts(s.warmup)
    def __call__(self, step):
        if step < self.w: return (step+1)/self.w
        if self.s.name=="constant": return 1.0
        t=min(1,(step-self.w)/max(1,self.total-self.w))
        if self.s.name=="linear": return 1-t
        return self.s.floor+(1-self.s.floor)*0.5*(1+math.cos(math.pi*t))
    def momentum(self, step): return None
def build(s: Any, total_steps: Any, to_steps: Any) -> Any: return Built(s,total_steps,to_steps)
