"""What goes wrong, when, and with whom: a plan in TOML, read by the command line and by the simulator alike. Pure.

seed = 7                    # of every choice and of whatever is random in a fault

[[fault]]
at = "20s"                  # since the plan began
kind = "kill"               # kill, freeze, slow, delay, loss, partition, rail-down or corrupt
pool = "expert"             # some of a pool; or one member: target = "expert/3"
mode = "fixed:2"            # one (the default), all, fixed:2 or percent:25 of the pool

[[fault]]
at = "40s"
kind = "slow"
target = "expert/3"
for = "10s"                 # then it reverts by itself (the default is 10s)
times = 10                  # slow; or by = "5ms" (delay), share = 0.1 (loss, corrupt), peers = ["expert/1"],
                            # where = "computed", after = 100 (kill, freeze), within = "60s" (for that point),
                            # where = "nan" (corrupt), rail = "eth1"
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from router.faults import KINDS, POINT_WAIT_S, Fault, FaultInvalid
from router.view import POOLS

if TYPE_CHECKING:
    from random import Random

_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|)")
_MODE: Final = re.compile(r"one|all|fixed:(\d+)|percent:(\d+)")
# Words of a fault in a plan, and those of router.faults that they become.
WORDS: Final = {"for": "for_s", "by": "by_s"} | {
    word: word for word in ("times", "share", "peers", "where", "after", "rail")
}
# What a fault is by hand, where nothing else is said.
BY_HAND: Final[Mapping[str, Any]] = {"for": "10s", "times": 10.0, "by": "5ms", "share": 0.1}
# What each kind does, for whoever injects it by hand, and an example of it.
TEXTS: Final = {
    "kill": ("End processes with SIGKILL, as a crash would.", "kill expert/1"),
    "freeze": ("Stop processes with SIGSTOP for a while, as a hung host would.", "freeze expert/2 --for 5s"),
    "slow": ("Make expert servers take longer for their work.", "slow --pool expert --mode percent:25 --times 10"),
    "delay": ("Make every frame from and to members late.", "delay expert/1 --by 5ms --for 30s"),
    "loss": ("Lose a share of the frames from and to members.", "loss expert/1 --share 0.1 --seed 7"),
    "partition": ("Cut members off from the others, or from some.", "partition expert/1 --peers attention/1"),
    "rail-down": ("Take a rail of members down.", "rail-down expert/1 --rail eth1"),
    "corrupt": (
        "Damage a share of the frames: after their checksum (wire), or their rows before it (rows, nan).",
        "corrupt expert/1 --where rows --share 0.01 --dry-run",
    ),
}
_WHOM: Final = ("target", "pool", "mode")
_LONGEST_PLAN_S: Final = 86400.0


class PlanInvalid(ValueError):
    """A plan that cannot be carried out; the text says what was found, what is needed and what to do."""


@dataclass(frozen=True, kw_only=True)
class Select:
    """Whom a fault hits: one member by its name, or some of a pool.

    Attributes:
        target: Such as "expert/3"; or empty.
        pool: "expert", "attention", "gateway" or "router"; or empty.
        mode: Of the pool: "one", "all", "fixed:2", or "percent:25", rounded up.
    """

    target: str = ""
    pool: str = ""
    mode: str = "one"

    def __post_init__(self) -> None:
        if bool(self.target) == bool(self.pool):
            found = f"target {self.target!r} and pool {self.pool!r}" if self.target else "neither target nor pool"
            raise PlanInvalid(
                f'{found} given; one of them is needed: a member (target "expert/3") or a pool (pool "expert").'
            )
        if self.pool and self.pool not in (*POOLS, "router"):
            raise PlanInvalid(f"pool {self.pool!r} is unknown; give one of {', '.join((*POOLS, 'router'))}.")
        found = _MODE.fullmatch(self.mode)
        if found is None or (found[1] and not int(found[1])) or (found[2] and not 0 < int(found[2]) <= 100):
            raise PlanInvalid(f"mode {self.mode!r} is unknown; give one, all, fixed:2 or percent:25.")
        if self.target and self.mode != "one":
            raise PlanInvalid(
                f"mode {self.mode} with target {self.target}: a target is one member; give a pool instead."
            )

    def __str__(self) -> str:
        return self.target or f"{self.mode} of pool {self.pool}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One fault of a plan.

    Attributes:
        at_s: Since the plan began.
        fault: With an empty id; who carries it out gives one.
        within_s: Longest wait for the point where a kill or a freeze is to happen.
    """

    at_s: float
    select: Select
    fault: Fault
    within_s: float = POINT_WAIT_S

    def __post_init__(self) -> None:
        if not 0 < self.within_s <= POINT_WAIT_S:
            raise PlanInvalid(f"within is {self.within_s:g} s; above 0 and at most {POINT_WAIT_S:g} s is needed.")
        if self.within_s != POINT_WAIT_S and not self.waits:
            raise PlanInvalid("within goes with where, of a kill or a freeze: leave it out, or name a point.")

    @property
    def waits(self) -> bool:
        """Whether it happens at a point of the protocol, when its member passes that."""
        return self.fault.kind in ("kill", "freeze") and bool(self.fault.where)

    @property
    def lasts_s(self) -> float:
        """After so long nothing of it is left; a kill at once lasts no time."""
        if not self.waits:
            return self.fault.lasts_s
        return self.within_s + (self.fault.for_s if self.fault.kind == "freeze" else 0.0)

    @property
    def end_s(self) -> float:
        """When it has reverted by itself at the latest, since the plan began."""
        return self.at_s + self.lasts_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Faults in the order of their times. seed: of every choice."""

    seed: int = 0
    steps: tuple[Step, ...]

    @property
    def end_s(self) -> float:
        """When the last fault has reverted, since the plan began."""
        return max((step.end_s for step in self.steps), default=0.0)


@dataclass(frozen=True, kw_only=True)
class FaultEvent:
    """Something that came of a plan.

    Attributes:
        at_s: Since the plan began.
        phase: "began", "ended", or "refused" (nothing was done).
        id: What `clear` takes; empty when refused.
        targets: Names of the members.
        text: What was done, or why not.
    """

    at_s: float
    phase: str
    id: str
    kind: str
    targets: tuple[str, ...]
    text: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "at_s": round(self.at_s, 3), "targets": list(self.targets)}


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises PlanInvalid: no such file, or no such plan in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanInvalid(f"{path} cannot be read ({error}); name a TOML file with [[fault]] tables.") from None
    try:
        return parse_plan(text)
    except PlanInvalid as error:
        raise PlanInvalid(f"{path}: {error}") from None


def parse_plan(text: str) -> Plan:
    """The plan in a text of TOML. Raises PlanInvalid."""
    try:
        said = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanInvalid(f"no TOML: {error}.") from None
    unknown = sorted(set(said) - {"seed", "fault"})
    if unknown:
        raise PlanInvalid(f"{', '.join(unknown)} unknown; a plan has seed and [[fault]] tables.")
    seed = said.get("seed", 0)
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise PlanInvalid(f"seed is {seed!r}; a whole number from 0 is needed.")
    tables = said.get("fault", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in cast(list[Any], tables)):
        raise PlanInvalid("no fault found; at least one [[fault]] table is needed.")
    steps: list[Step] = []
    for number, table in enumerate(cast(list[dict[str, Any]], tables), 1):
        try:
            steps.append(_step(table, seed))
        except (PlanInvalid, FaultInvalid) as error:
            raise PlanInvalid(f"fault {number}: {error}") from None
    return Plan(seed=seed, steps=tuple(sorted(steps, key=lambda step: step.at_s)))


def _step(table: Mapping[str, Any], seed: int) -> Step:
    known = ("at", "kind", *_WHOM, *WORDS, "within")
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise PlanInvalid(f"{', '.join(unknown)} unknown; a fault has {', '.join(known)}.")
    for word in ("at", "kind"):
        if word not in table:
            raise PlanInvalid(f'{word} is missing; such as at = "20s", kind = "kill".')
    for word in ("kind", *_WHOM):
        if not isinstance(table.get(word, ""), str):
            raise PlanInvalid(f"{word} is {table[word]!r}; a text in quotes is needed.")
    at_s = seconds(table["at"])
    if at_s > _LONGEST_PLAN_S:
        raise PlanInvalid(f"at is {at_s:g} s; a plan lasts at most {_LONGEST_PLAN_S:g} s.")
    options = {word: value for word, value in table.items() if word in WORDS}
    select = Select(**{word: table[word] for word in _WHOM if word in table})
    within_s = seconds(table.get("within", POINT_WAIT_S))
    return Step(at_s=at_s, select=select, fault=fault_of(table["kind"], seed, options), within_s=within_s)


def fault_of(kind: str, seed: int, options: Mapping[str, Any]) -> Fault:
    """A fault from the words of a plan or of a command line; its id is empty. Args: options: by the words in WORDS;
    durations as text ("5ms") or seconds. Raises PlanInvalid, FaultInvalid: a value makes no sense, or the kind does not
    take it."""
    said = {WORDS[word]: seconds(value) if word in ("for", "by") else value for word, value in options.items()}
    if kind == "kill" and "for_s" in said:
        raise PlanInvalid("kill takes no for: what is killed stays so; leave it out, or freeze it.")
    return Fault.from_dict({"id": "", "kind": kind, "seed": seed, **said})


def plan_by_hand(kind: str, options: Mapping[str, Any], select: Select, seed: int, within: Any = POINT_WAIT_S) -> Plan:
    """One fault, at once. Args: options: by the words in WORDS; what is not said, or None, is as `by_hand` has it.
    Raises PlanInvalid, FaultInvalid: as `fault_of`."""
    said = {word: by_hand(kind, word) for word in words_of(kind)} | dict(options)
    fault = fault_of(kind, seed, {word: value for word, value in said.items() if value is not None})
    step = Step(at_s=0.0, select=select, fault=fault, within_s=seconds(within))
    return Plan(seed=seed, steps=(step,))


def words_of(kind: str) -> list[str]:
    """The words in WORDS that a fault of this kind takes."""
    taken = KINDS[kind] if kind == "kill" else KINDS[kind] | {"for_s"}
    return [word for word, field in WORDS.items() if field in taken]


def by_hand(kind: str, word: str) -> Any:
    """What an option of a fault is by hand where it is not said; None: the fault's own default."""
    return "wire" if (kind, word) == ("corrupt", "where") else BY_HAND.get(word)


def seconds(said: Any) -> float:
    """A duration: seconds, or a number with its unit such as "30s", "5ms", "2m". Raises PlanInvalid."""
    if isinstance(said, str) and (found := _DURATION.fullmatch(said.strip())):
        return float(found[1]) * _SECONDS[found[2]]
    if isinstance(said, int | float) and not isinstance(said, bool) and 0 <= said < 1e9:
        return float(said)
    raise PlanInvalid(f"{said!r} is no duration; give a number with us, ms, s, m or h, such as 30s or 5ms.")


def choose(select: Select, members: Sequence[str], dice: Random) -> list[str]:
    """Whom to hit, of those who are there: at least one name, sorted; the same for the same dice and members, in
    whatever order these come. Raises PlanInvalid: the target is not there, or too few of the pool are.

    Args: members: names, as "expert/3"; what stands before the slash is the pool."""
    there = ", ".join(members) or "nobody"
    if select.target:
        if select.target not in members:
            raise PlanInvalid(f"No member {select.target!r} here; name one of: {there}.")
        return [select.target]
    found = sorted(name for name in members if name.partition("/")[0] == select.pool)
    how, _, number = select.mode.partition(":")
    wanted = {"one": 1, "all": max(1, len(found))}.get(how) or int(number)
    if how == "percent":
        wanted = max(1, math.ceil(len(found) * wanted / 100))
    if len(found) < wanted:
        raise PlanInvalid(f"{select} needs {wanted} members, found {len(found)}; there are: {there}. Ask for fewer.")
    return sorted(dice.sample(found, wanted))


def in_words(names: Sequence[str], fault: Fault) -> str:
    """A fault as a line of text: what, with whom, how long."""
    said = fault.to_dict()
    how = [f"{word} {said[word]}" for word in ("times", "by_s", "share", "where", "after", "rail") if word in said]
    if fault.peers:
        how.append(f"with {', '.join(fault.peers)}")
    if fault.kind != "kill":
        how.append(f"for {fault.for_s:g} s")
    return " ".join([fault.kind, ", ".join(names), *how])
