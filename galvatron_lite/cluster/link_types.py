"""Data sheets of links and networks, with what collectives were published to reach on them. No torch here.

``bandwidth`` is in one direction: of one device inside a node, of one adapter in a network. Starting values:

- NVLink efficiency: bus bandwidth of nccl-tests' all-reduce on large messages over the data sheet. DGX-1V 130 of
  150 GB/s and DGX-2 120 of 150 (developer.nvidia.com/blog/scaling-deep-learning-training-nccl); DGX A100 230 to 240 of
  300 (github.com/NVIDIA/nccl/issues/307 and nccl-tests' PERFORMANCE.md); DGX H100 360 to 370 of 450 with rings (480
  with the switches' own reduction, which reduce-scatter and all-gather do not have); B200 690 of 900.
- Latency: NCCL's src/graph/tuning.cc takes 0.6/1.9/3.4 us (LL/LL128/Simple) for a ring hop over NVLink, 1.0/1.9/5.7 us
  over PCIe and 2.7/4.0/14 us over a network.
- Networks: nccl-tests over 8 HDR adapters a node 180 to 190 of 200 GB/s, 8 NDR 360 to 370 of 400; EFA 3200 Gb/s about
  300 to 320 of 400 GB/s (github.com/aws-samples/awsome-distributed-training, nccl-tests); Ethernet by TCP [Empirical].
- ``half_size``: 64 to 128 KiB a rank and step inside a node, 128 to 512 KiB over networks; NCCL's pipeline works on
  slices of 512 KiB (NCCL_BUFFSIZE 4 MiB in 8 steps), below which a step no longer fills the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.calibration.schema import LinkConstants

_KIB = 1024.0


@dataclass(frozen=True, slots=True)
class LinkType:
    """One type of link."""

    name: str  # key of its calibrated constants
    # bytes per second in one direction, of a device (inside a node) or an adapter (network); 0 where the adapter
    # depends on the design
    bandwidth: float
    constants: LinkConstants  # starting values of what is calibrated
    source: str  # address of the data sheet
    network: bool = False  # whether it joins nodes
    contention: float = 1.0  # factor by which times grow when all members send at once
    domain: int = 0  # devices that one switch domain joins, however many nodes they are in; 0: those of a node
    # share of the bandwidth that a group of so many of a node's 8 devices reaches, where they are joined directly and
    # not by a switch; ascending
    mesh: tuple[tuple[int, float], ...] = ()

    def mesh_of(self, node: int) -> tuple[tuple[int, float], ...]:
        """The same for a node of so many devices: 4 joined by all their links reach all of them.

        A node of four V100 has two links between each pair (3 x 2 x 25 GB/s, ABCI and Summit-like designs); one of
        eight is a hybrid cube mesh.
        """
        if not self.mesh or node > 4:
            return self.mesh
        return tuple((size, (size - 1) / max(node - 1, 1)) for size in range(2, node + 1))


def _nvlink(name: str, gigabytes: float, efficiency: float, source: str, **more: object) -> LinkType:
    return LinkType(name, gigabytes * 1e9, LinkConstants(efficiency, 3e-6, 96 * _KIB), source, **more)  # type: ignore[arg-type]


def _pcie(name: str, gigabytes: float, source: str) -> LinkType:
    # Cards behind one host bridge share it: a ring through all of them halves what a pair alone reaches.
    return LinkType(name, gigabytes * 1e9, LinkConstants(0.75, 6e-6, 96 * _KIB), source, contention=2.0)


def _network(name: str, gigabits: float, efficiency: float, latency: float, source: str) -> LinkType:
    constants = LinkConstants(efficiency, latency, 256 * _KIB)
    return LinkType(name, gigabits * 1e9 / 8, constants, source, network=True)


_PCISIG = "https://pcisig.com/specifications"
_VOLTA = "https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_NVLINK = "https://www.nvidia.com/en-us/data-center/nvlink/"
_IBTA = "https://www.infinibandta.org/infiniband-roadmap/"
_EFA = "https://aws.amazon.com/ec2/instance-types/p5/"
_OPA = "https://www.cornelisnetworks.com/products/omni-path-100"

_CUBE_MESH = ((2, 1 / 6), (4, 4 / 6), (8, 1.0))
"""DGX-1: neighbours have 1 of a device's 6 links between them, a group of four uses 4 (DGX-1 white paper, figure 4)."""

_ALL: tuple[LinkType, ...] = (
    _nvlink(
        "nvlink1", 80, 0.8, "https://images.nvidia.com/content/pdf/tesla/whitepaper/pascal-architecture-whitepaper.pdf"
    ),
    _nvlink("nvlink2-switch", 150, 0.8, _VOLTA),
    _nvlink("nvlink2", 150, 0.85, _VOLTA, mesh=_CUBE_MESH),
    _nvlink("nvlink3", 300, 0.78, _AMPERE),
    _nvlink("nvlink3-a800", 200, 0.78, _AMPERE),
    _nvlink("nvlink4", 450, 0.81, _HOPPER),
    _nvlink("nvlink4-h800", 200, 0.81, _HOPPER),
    _nvlink("nvlink5", 900, 0.77, _NVLINK),
    _nvlink("nvlink5-nvl72", 900, 0.77, _NVLINK, domain=72),
    _pcie("pcie3", 15.75, _PCISIG),
    _pcie("pcie4", 31.5, _PCISIG),
    _pcie("pcie5", 63.0, _PCISIG),
    _network("infiniband-edr", 100, 0.9, 10e-6, _IBTA),
    _network("infiniband-hdr", 200, 0.92, 10e-6, _IBTA),
    _network("infiniband-ndr", 400, 0.91, 10e-6, _IBTA),
    _network("infiniband-xdr", 800, 0.9, 10e-6, _IBTA),
    _network("omni-path", 100, 0.85, 12e-6, _OPA),
    _network(
        "roce", 0, 0.87, 12e-6, "https://docs.nvidia.com/networking/display/rdmacore50/rdma+over+converged+ethernet"
    ),
    _network("efa", 100, 0.78, 20e-6, _EFA),
    _network("ethernet", 0, 0.6, 30e-6, "https://www.ieee802.org/3/"),
    _network("unknown", 0, 0.85, 12e-6, "the device's reference design"),
)

LINKS: dict[str, LinkType] = {link.name: link for link in _ALL}
"""Every link type by name."""
