"""Report on the keys of a LoRA file, for users."""

from collections import defaultdict
from dataclasses import dataclass, field

from ..kernels import shown

# Most lines about pairs that do not fit, which can have any number of shapes.
_MISFITS = 5


@dataclass
class KeyReport:
    """Report on the keys of a file, by the reason why they are not applied."""

    name: str
    used: int = 0
    absent: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by last name
    unfit: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason
    unsupported: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by kind
    unknown: list[str] = field(default_factory=list)
    text_encoder: int = 0
    repeated: int = 0  # in another dialect, or of another adapter
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return a line for the applied keys, and one for each group of other keys."""
        lines = [f"{self.name}: {self.used} keys applied"]
        groups: dict[int, list[str]] = defaultdict(list)
        for leaf, count in self.absent.items():
            groups[count].append(leaf)
        for count, leaves in sorted(groups.items(), reverse=True):
            names = "/".join(map(shown, leaves[:4])) + ("/..." if len(leaves) > 4 else "")
            lines.append(f"  {count * len(leaves)} keys for {names}: not in this model")
        misfits = list(self.unfit.items())
        lines += [f"  {count} keys do not fit: {why}" for why, count in misfits[:_MISFITS]]
        if rest := sum(count for _, count in misfits[_MISFITS:]):
            lines.append(f"  {rest} more keys do not fit")
        for kind, count in self.unsupported.items():
            lines.append(f"  {count} keys of an unsupported kind ({kind})")
        if self.unknown:
            some = ", ".join(map(shown, self.unknown[:3]))
            some += ", ..." if len(self.unknown) > 3 else ""
            lines.append(f"  {len(self.unknown)} keys of an unknown form: {some}")
        if self.text_encoder:
            lines.append(f"  {self.text_encoder} keys for a text encoder: not applied to a model")
        if self.repeated:
            lines.append(
                f"  {self.repeated} keys are ignored: earlier keys or adapters have their weights"
            )
        return lines + [f"  {note}" for note in self.notes]
