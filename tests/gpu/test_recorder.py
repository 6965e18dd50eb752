"""The recorder sees what a GPU would be asked: binaries, grids, graphs; and keeps host and device apart."""

from __future__ import annotations

from typing import Any

from tests.gpu.recorder import apart


def keys() -> dict[str, Any]:
    """Launches of one kernel with a table of 16, 32, 17 and 1 columns, and with one whose memory begins at 4 bytes."""
    import torch

    from eaas.gpu.inputs import patch_kernel
    from tests.gpu.recorder import recording

    with recording() as seen:
        words = torch.full((64,), 7, dtype=torch.int32, device="cuda")
        for columns, begin in ((16, 0), (32, 0), (17, 0), (1, 0), (16, 1)):
            patch_kernel[(3,)](words[begin:], words, words, columns, BLOCK=64, num_warps=2)  # pyright: ignore[reportCallIssue]
        try:
            words.numpy()
            refused = ""
        except TypeError as error:
            refused = str(error)
        return {
            "kernel": seen.launches[0].kernel,
            "grid": seen.launches[0].grid,
            "warps": seen.launches[0].warps,
            "keys": [launch.key for launch in seen.launches],
            "constants": [launch.constants for launch in seen.launches],
            "refused": refused,
            "kept": words.cpu().tolist(),
            "operations": [name for name, _ in seen.operations],
        }


def test_launches_are_specialized_as_on_a_gpu_and_launch_nothing() -> None:
    found = apart("tests.gpu.test_recorder:keys")
    assert found["kernel"] == "eaas.gpu.inputs.patch_kernel"
    assert (found["grid"], found["warps"], found["kept"]) == ([3], 2, [7] * 64)
    sixteen, thirty_two, seventeen, one, askew = found["keys"]
    assert sixteen == thirty_two and len({sixteen, seventeen, one, askew}) == 4, found["keys"]
    assert found["constants"] == [{"BLOCK": 64}] * 3 + [{"columns": 1, "BLOCK": 64}, {"BLOCK": 64}]
    assert found["operations"] == ["full", "copy"] and "copy it to the host" in found["refused"]


def graphs() -> list[tuple[int, int, int, bool]]:
    """Of three steps of one size: graphs captured, graphs launched, kernels, and whether any was outside a capture."""
    from tests.gpu.production import decode_step, decoder_of
    from tests.gpu.recorder import recording

    found = []
    with recording() as seen:
        decoder = decoder_of("S", layers=1)
        for batch in (3, 4, 4):
            seen.clear()
            decode_step(decoder, batch)
            outside = any(not launch.captured for launch in seen.launches)
            found.append((seen.graphs, seen.replays, len(seen.launches), outside))
    return found


def test_steps_of_one_size_are_captured_once() -> None:
    first, *others = apart("tests.gpu.test_recorder:graphs")
    assert first[:2] == [1, 1] and first[2] > 20 and others == [[0, 1, 0, False]] * 2
