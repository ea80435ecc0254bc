"""Rot and loss after a clean stop: each is refused, or changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from rpcagent import errors

from .simdisk import SimDisk
from .story import Witness, live, open_log, replay


class Tally(NamedTuple):
    damages: int
    refused: int
    harmless: int


def clean_stop() -> tuple[dict[str, bytes], Witness]:
    disk, witness = SimDisk(), Witness()
    live(disk, witness)
    return disk.image(), witness


def judge(images: list[tuple[str, dict[str, bytes]]], witness: Witness) -> Tally:
    refused = harmless = 0
    for what, image in images:
        try:
            got = replay(open_log(SimDisk(image)))
        except (errors.StoreDamaged, errors.StoreTooNew) as error:
            refused += 1
            if isinstance(error, errors.StoreDamaged):
                assert {"file", "offset", "reason"} <= set(error.details)
            continue
        assert got == witness.issued, f"silent change: {what}"
        harmless += 1
    return Tally(len(images), refused, harmless)


def flip_every_byte(bits: tuple[int, ...] = (0, 4, 7)) -> Tally:
    base, witness = clean_stop()
    images = []
    for name, content in base.items():
        for place in range(len(content)):
            for bit in bits:
                rotten = bytearray(content)
                rotten[place] ^= 1 << bit
                images.append((f"{name} byte {place} bit {bit}", {**base, name: bytes(rotten)}))
    return judge(images, witness)


def cut_every_byte() -> Tally:
    base, witness = clean_stop()
    images = [
        (f"{name} cut at {place}", {**base, name: content[:place]})
        for name, content in base.items()
        for place in range(len(content))
    ]
    return judge(images, witness)


def lose_each_file() -> Tally:
    base, witness = clean_stop()
    images = [(f"{name} gone", {n: c for n, c in base.items() if n != name}) for name in base if not name.endswith("/")]
    return judge(images, witness)
