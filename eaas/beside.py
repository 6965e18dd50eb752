"""p2p, router and experts lie beside this package, and are found there: a folder of one of these names in the working
directory, or earlier on the path, is somebody else's. To be imported first, by whatever a process starts with."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_SIBLINGS = ("p2p", "router", "experts")


class _Beside:
    """A finder of these packages alone, asked before the path is."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(_ROOT)]) if name in _SIBLINGS else None


for _name in _SIBLINGS:
    if _found := sys.modules.get(_name):
        _file = getattr(_found, "__file__", None)
        if _ROOT / _name != Path(_file or "").resolve().parent:
            raise ImportError(
                f"{_name!r} was imported from {_file or list(_found.__path__)} before eaas, which needs its own at"
                f" {_ROOT / _name}. Import eaas.pool first, or rename the other."
            )
sys.meta_path.insert(0, _Beside)
