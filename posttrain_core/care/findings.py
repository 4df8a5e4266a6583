"""What fsck says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, what was found and expected, what to do about it."""

    key: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}. {self.remedy}."
