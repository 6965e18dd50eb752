"""The View as it goes over each stream: whole at first, then only what differs from what that stream has shown.

Of 600 members, with 61 layers of 256 experts, a whole View has 2.3 MB, and a loss changes a hundredth of it. For each
member it is known in which epoch it changed last: so what a watcher lacks is told from any epoch of this term that it
has, without keeping old Views.
"""

from __future__ import annotations

from collections import deque

from router.messages import packed, to_message
from router.proto import router_pb2 as pb
from router.records import phase, shown, view_of
from router.state import Config, MemberRecord, State

# Members that went: who has seen none of the last so many go is told the whole View.
_GONE_KEPT = 1024


class Publication:
    """What is published in one term."""

    def __init__(self) -> None:
        self._head = pb.View()
        self._shown: dict[str, tuple[MemberRecord, str]] = {}
        self._members: dict[str, tuple[int, pb.Member]] = {}
        self._gone: deque[tuple[int, str]] = deque()
        # An epoch from before which some that went are forgotten.
        self._least = 0
        self._made: dict[int, bytes] = {}

    @property
    def epoch(self) -> int:
        """Of the newest View; 0: there is none yet."""
        return self._head.epoch

    def publish(self, config: Config, state: State) -> None:
        """Take the members of a new epoch; their loads are those of the epoch in which they changed last."""
        self._head, self._made = to_message(view_of(config, state, members=())), {}
        for name in self._shown.keys() - state.members.keys():
            del self._shown[name], self._members[name]
            self._gone.append((state.epoch, name))
            if len(self._gone) > _GONE_KEPT:
                self._least = self._gone.popleft()[0]
        for name, record in state.members.items():
            said = phase(state, record)
            was = self._shown.get(name)
            if was is not None and was[0] is record and was[1] == said:
                continue
            self._shown[name] = record, said
            self._members[name] = state.epoch, packed(shown(state, record))

    def since(self, epoch: int) -> bytes:
        """The newest View; of it only what differs from that of `epoch`, which must be one of this term's, or 0.

        It is written once for all whose streams have shown the same.
        """
        if epoch < self._least:
            epoch = 0
        if (made := self._made.get(epoch)) is None:
            view = pb.View()
            view.CopyFrom(self._head)
            view.since = epoch
            view.members.extend(member for changed, member in self._members.values() if changed > epoch)
            if epoch:
                view.gone.extend(name for went, name in self._gone if went > epoch)
            made = self._made[epoch] = view.SerializeToString()
        return made
