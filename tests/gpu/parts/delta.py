"""GB/s of encoding the change of a step on the device, with the same bytes as on the host; and publishing from it."""

from __future__ import annotations

from benchmarks.device_publishing import codec_row, publish_row
from record import Facts, Place, run_part

ELEMENTS, SHARE, VERSIONS = 600_000_000, 0.01, 3


def part(place: Place) -> Facts:
    """1 % changed."""
    elements = 1_000_000 if place.dry else ELEMENTS
    device = place.device.type
    codec_row(device, 1_000_000, SHARE)  # kernels are loaded
    rows = [codec_row(device, elements, SHARE)]
    rows += [publish_row(way, device, elements, SHARE, VERSIONS) for way in ("snapshot on the device",)]
    return {
        "elements": elements, "encode_gb_s": rows[0]["device_gb_s"], "host_encode_gb_s": rows[0]["host_gb_s"],
        "rows": rows, "ok": all(row["same_bytes"] for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    run_part("delta", part)
