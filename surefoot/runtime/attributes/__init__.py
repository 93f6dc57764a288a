"""State in plain attributes of a model's modules, which PyTorch neither moves nor saves."""

from surefoot.runtime.attributes.generators import (
    find_generators,
    generator_state,
    is_generator,
    restore_generator,
    sign_generator,
    sign_state,
)
from surefoot.runtime.attributes.snapshot import AttributeSnapshot
from surefoot.runtime.attributes.stored import (
    Stored,
    check_attributes,
    encode_attributes,
    put_back_attributes,
)
from surefoot.runtime.attributes.tracker import AttributeChanges, AttributeTracker

__all__ = [
    "AttributeSnapshot",
    "AttributeTracker",
    "AttributeChanges",
    "Stored",
    "check_attributes",
    "encode_attributes",
    "find_generators",
    "generator_state",
    "is_generator",
    "put_back_attributes",
    "restore_generator",
    "sign_generator",
    "sign_state",
]
