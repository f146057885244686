"""What a GPU reports about its speed."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What a GPU reports about its speed. Zeros stand for what it does not report.

    Attributes:
        device_kind: JAX's name of the GPU.
        compute_capability: Major and minor.
        sms: Number of streaming multiprocessors.
        sm_clock_hz: Highest clock of the SMs.
        link_bytes_per_s: Rate of all active NVLinks together, in one direction.
        memory_bytes_per_s: Peak rate of the memory.
    """

    device_kind: str
    compute_capability: tuple[int, int]
    sms: int
    sm_clock_hz: float
    link_bytes_per_s: float
    memory_bytes_per_s: float

    @property
    def complete(self) -> bool:
        """Whether the GPU has reported everything."""
        return min(self.sms, self.sm_clock_hz, self.link_bytes_per_s, self.memory_bytes_per_s) > 0
