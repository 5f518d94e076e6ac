"""Production kernels that are measured beside ours, each behind one small adaptor (`_interface.Peer`).

`discover` finds every adaptor of the folder. One that cannot run here stays in the list, and its `available()` says
why; `lab.peer_arm` turns that into a named row NOT_INSTALLED.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from lab.peers._interface import Availability, Candidate, Peer, PeerError, check_adaptor


def discover(folder: Path | None = None) -> list[Peer]:
    """All adaptors of a folder (default: this one), by name. PeerError for one that is broken or a name given twice."""
    folder = folder or Path(__file__).parent
    found: dict[str, Peer] = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem.startswith("_"):
            continue
        peer = check_adaptor(_load(path))
        if peer.NAME in found:
            raise PeerError(f"{path.name} and another adaptor are both called {peer.NAME}")
        found[peer.NAME] = peer
    return [found[name] for name in sorted(found)]


def _load(path: Path) -> object:
    if path.parent == Path(__file__).parent:
        return importlib.import_module(f"{__name__}.{path.stem}")
    name = f"{__name__}._outside_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses of the adaptor look their module up
    spec.loader.exec_module(module)
    return module


__all__ = ["Availability", "Candidate", "Peer", "PeerError", "discover"]
