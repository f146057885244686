"""The generations of GPUs: one record each. docs/porting.md says how to add one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """What the selection knows of the GPUs of a generation.

    Attributes:
        name: by which the table knows it.
        kinds: words of JAX's device kinds that belong to it.
        sms: the SMs that launches count on. A constant, because all ranks must launch alike.
        measured_on: the GPUs that its rows of the table were measured on, for reasons; None for a
            generation without rows, which uses Hopper's.
        fused: the compute capability that the fused kernel is compiled for; None if it has none.
            Without one, matmuls are not overlapped.
    """

    name: str
    kinds: tuple[str, ...]
    sms: int
    measured_on: str | None = None
    fused: tuple[int, int] | None = None


# Whose rows and SMs the GPUs without rows of their own use.
HOPPER = Generation(
    name="hopper",
    kinds=("H100", "H200", "H800", "H20", "GH200"),
    sms=132,
    measured_on="Hopper GPUs",
    fused=(9, 0),
)
GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation("ampere", ("A100", "A800", "A30", "A40"), sms=108),
        HOPPER,
        Generation("blackwell", ("B100", "B200", "B300", "GB200", "GB300"), sms=148),
    )
}


def hardware_of(platform: str, device_kind: str) -> str:
    """The hardware by which the table knows a device: "cpu", a generation, or "gpu".

    It compares whole words of the device kind: "NVIDIA H20" is no "NVIDIA H200".
    """
    if platform == "cpu":
        return "cpu"
    words = device_kind.replace("-", " ").split()
    for generation in GENERATIONS.values():
        if any(word in generation.kinds for word in words):
            return generation.name
    return "gpu"


def of_hardware(hardware: str) -> Generation:
    """The generation of this name; Hopper for other hardware."""
    return GENERATIONS.get(hardware, HOPPER)
