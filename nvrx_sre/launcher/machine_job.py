"""What the parts of the launcher machine share: configuration, stage, generations, and the way commands leave.

Pure state: no I/O, no clock. One `Job` a machine; its parts hold a reference to it and to nothing global.
Invariants: `generation` only rises, by one at each opening; commands leave in the order they were added,
except that `PublishSealed` and then `StrandSlots` leave last (the slots of a save are held before they may be reused).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from nvrx_sre.core.ids import device_id, node_of
from nvrx_sre.core.limits import Limits
from nvrx_sre.events.schema import Event
from nvrx_sre.launcher.commands import Command, Emit, PublishSealed, StrandSlots
from nvrx_sre.policy.history import History
from nvrx_sre.policy.membership import members


class Stage(StrEnum):
    """What the machine as a whole is doing."""

    FORMING = "forming"
    """Ranks are gathered for the next generation."""
    OPEN = "open"
    """A generation is open: its ranks run the training function."""
    STOPPING = "stopping"
    """The end is decided; durable state is drained and children leave."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """What the machine has to know of the configuration."""

    world_size: int
    """Ranks that were asked for; the world is smaller once devices are excluded."""
    num_standbys: int
    limits: Limits
    min_world_size: int | None = None
    """Ranks below which the run does not go on; None: all."""
    world_multiple: int = 1
    """Ranks that can only take part together."""
    tunes_deadlines: bool = False
    """Progress deadlines are tightened by what is observed."""
    exact_replay: bool = False
    """A step that gives another loss when it is executed again ends the run."""
    waits_for_writer: bool = False
    """A due save that finds the writer busy makes the ranks wait, rather than being skipped."""
    node: str = "node"
    """Name of this node, for device identities."""
    num_nodes: int = 1
    """Nodes that share the ranks evenly, in their order; this one is node 0, the others join."""
    hot_every: int | None = 1
    """Steps between hot captures, 0 for none, None to have it chosen by measurement."""
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs of this node's devices by local index, where they are known."""
    unfit: Mapping[int, str] = field(default_factory=dict)
    """Devices of this node, by local index, that should have no rank, and why."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node while none is excluded."""
        return self.world_size // self.num_nodes

    @property
    def devices(self) -> tuple[str, ...]:
        """Identities of all devices, node by node, by local index; nodes that have not joined are called by number."""
        own = devices_of_node(self.node, self.ranks_per_node, self.gpu_uuids)
        others = (unknown_node(number) for number in range(1, self.num_nodes))
        return (*own, *(device for name in others for device in devices_of_node(name, self.ranks_per_node, ())))


def devices_of_node(name: str, num_devices: int, gpu_uuids: Sequence[str]) -> tuple[str, ...]:
    """Identities of a node's devices by local index: by UUID if each rank has a device of its own, else by index."""
    has_own = num_devices <= len(gpu_uuids)
    return tuple(device_id(name, index, gpu_uuids[index] if has_own else None) for index in range(num_devices))


def unknown_node(number: int) -> str:
    """What a node is called before it has joined."""
    return f"node-{number}"


@dataclass(frozen=True, kw_only=True)
class MachineStart:
    """Where earlier launchers of the run left off."""

    generation: int
    """Last generation number used, 0 if none."""
    high_water: int
    """Highest step ever committed."""
    wall_offset_ns: int
    """wall = monotonic + offset."""
    commits_on_record: bool
    """A durable commit was ever recorded."""


@dataclass(kw_only=True)
class Job:
    """Shared state of the machine."""

    config: MachineConfig
    start: MachineStart
    history: History
    stage: Stage = Stage.FORMING
    generation: int = 0
    """Generation that was opened last; `pending` is the one that is being formed."""
    fault_serial: int = 0
    """Faults so far: tells whether a child belongs to the attempt at hand."""
    hot_allowed: bool = True
    hot_every: int = 0
    """Steps between hot captures that are in force, or will be at the next generation."""
    checkpoints_back: int = 0
    go_ns: int = 0
    """Monotonic time at which `generation` was opened."""
    devices: tuple[str, ...] = ()
    """Devices of the world that is open or being formed, by rank."""
    absent: set[int] = field(default_factory=set)
    """Nodes that are not there."""
    left_out: set[int] = field(default_factory=set)
    """Nodes that the world does without, whether they have come back or not."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Devices that should have no rank, and why; they have one while the world is too small without them."""
    unused: set[str] = field(default_factory=set)
    """Those of them that the world does without."""
    _commands: list[Command] = field(default_factory=list)
    _publish: int | None = None
    _strand: int | None = None
    _devices_on: list[tuple[str, ...]] = field(default_factory=list)
    """Every device there is: of each node, by local index."""
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Node and local index of each."""
    _nodes_of: tuple[str, ...] = ()
    _nodes: tuple[int, ...] = ()
    _num_on: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        per_node, devices = self.config.ranks_per_node, self.config.devices
        self._devices_on = [devices[first : first + per_node] for first in range(0, len(devices), per_node)]
        self._places = {device: divmod(index, per_node) for index, device in enumerate(devices)}
        self.absent = set(range(1, self.config.num_nodes))
        for index, reason in self.config.unfit.items():
            self.note_unfit(0, index, reason)
        self.devices = self.devices_without("")
        self.leave_unfit_out()
        self.devices = self.devices_without("")

    @property
    def world_size(self) -> int:
        """Ranks of the world that is open or being formed."""
        return len(self.devices)

    def devices_without(self, device: str) -> tuple[str, ...]:
        """The world without `device`, those that were excluded before and nodes that are left out, in whole units."""
        return self.devices_of(self.left_out, device)

    def devices_of(self, left_out: set[int], device: str = "") -> tuple[str, ...]:
        """The same with the nodes of `left_out` left out."""
        usable = (item for node, on in enumerate(self._devices_on) if node not in left_out for item in on)
        return members(usable, {device, *self.history.excluded, *self.unused}, self.config.world_multiple)

    def num_devices_of(self, left_out: set[int]) -> int:
        """How many those would be: looks at no device that is well, however many there are."""
        lame = {place for device in (*self.history.excluded, *self.unused) if (place := self._places.get(device))}
        num_all = (self.config.num_nodes - len(left_out)) * self.config.ranks_per_node
        num = num_all - sum(node not in left_out for node, _ in lame)
        return num - num % self.config.world_multiple

    def leave_unfit_out(self) -> list[str]:
        """Let the coming worlds do without unfit devices, as far as they are large enough then; the devices."""
        left_out = []
        for device in self.unfit:
            if device not in self.unused and self.can_exclude(device):  # each one leaves less for the next
                self.unused.add(device)
                left_out.append(device)
        return left_out

    def note_unfit(self, node: int, index: int, reason: str) -> None:
        """The device with this index should have no rank; of one that is no rank's nothing is noted."""
        if 0 <= node < len(self._devices_on) and 0 <= index < self.config.ranks_per_node:
            self.unfit.setdefault(self._devices_on[node][index], reason)

    def is_enough(self, num_devices: int) -> bool:
        """A world of so many devices may go on."""
        num_least = self.config.world_size if self.config.min_world_size is None else self.config.min_world_size
        return num_devices >= max(1, num_least)

    def can_exclude(self, device: str) -> bool:
        """The world without `device` is smaller, and large enough."""
        return device in self.devices and self.is_enough(len(self.devices_without(device)))

    def name_node(self, node: int, name: str, gpu_uuids: Sequence[str] = ()) -> str:
        """The node has joined: its devices are called by its name from now on, with its number where that is taken."""
        others = (node_of(on[0]) for of_node, on in enumerate(self._devices_on) if of_node != node)
        name = f"{name}-{node}" if name in others else name
        ranks = self.ranks_on(node)
        old, new = self._devices_on[node], devices_of_node(name, self.config.ranks_per_node, gpu_uuids)
        for device in old:
            del self._places[device]
        self._places |= {device: (node, index) for index, device in enumerate(new)}
        self._devices_on[node] = new
        renamed = dict(zip(old, new, strict=True))
        of_node = (renamed[device] for device in self.devices[ranks.start : ranks.stop])
        self.devices = (*self.devices[: ranks.start], *of_node, *self.devices[ranks.stop :])
        self._nodes_of = self.devices  # each rank is where it was
        return name

    def node_name(self, node: int) -> str:
        """What the node is called."""
        return node_of(self._devices_on[node][0])

    def local_rank(self, rank: int) -> int:
        """Index of the rank's device on its node: where it stands as long as the node does, whatever the rank."""
        return self._places[self.devices[rank]][1]

    def node(self, rank: int) -> int:
        """Node of the rank's device."""
        return self._places[self.devices[rank]][0]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of each rank of the world."""
        if self._nodes_of is not self.devices:  # looked up once for each world, however many ranks ask
            self._nodes_of = self.devices
            self._nodes = tuple(self._places[device][0] for device in self.devices)
            self._num_on = Counter(self._nodes)
        return self._nodes

    def ranks_on(self, node: int) -> range:
        """Ranks of the world on a node: ranks go node by node."""
        return range(bisect_left(self.nodes, node), bisect_right(self.nodes, node))

    def num_ranks_on(self, node: int) -> int:
        """Ranks of the world on a node."""
        return self._num_on[node] if self.nodes else 0

    @property
    def pending(self) -> int:
        """Number of the generation that comes next."""
        return self.generation + 1

    @property
    def is_before_first_step(self) -> bool:
        """No step of the run was ever committed, as far as is recorded."""
        return self.history.first_step_ns is None and not self.start.commits_on_record

    def device(self, rank: int | None) -> str:
        """Identity that faults of `rank` are counted against, '' if the rank is unknown."""
        return "" if rank is None or rank >= self.world_size else self.devices[rank]

    def wall_ns(self, mono_ns: int) -> int:
        """Wall time of a monotonic stamp of this host."""
        return mono_ns + self.start.wall_offset_ns

    def command(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def emit(self, event: Event, rank: int | None = None, generation: int | None = None) -> None:
        """Add an event, stamped with the open generation unless another is given."""
        self._commands.append(
            Emit(event=event, generation=self.generation if generation is None else generation, rank=rank)
        )

    def publish_sealed(self, step: int) -> None:
        """The newest step sealed on every rank; only the last of one input leaves."""
        self._publish = step

    def forget_sealed(self) -> None:
        """What was sealed no longer holds: nothing is published for it."""
        self._publish = self._strand = None

    def strand(self, step: int) -> None:
        """`step` was captured by some ranks only; leaves after what is sealed was published."""
        self._strand = step

    def take(self) -> list[Command]:
        """The commands added since the last call."""
        commands, self._commands = self._commands, []
        if self._publish is not None:
            commands.append(PublishSealed(step=self._publish))
            self._publish = None
        if self._strand is not None:
            commands.append(StrandSlots(generation=self.generation, step=self._strand))
            self._strand = None
        return commands
