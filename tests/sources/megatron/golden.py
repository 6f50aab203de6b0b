"""Three pairs as Megatron-LM wrote them (NVIDIA/Megatron-LM, commit d98e8a64ddf34856e74b24714e3bedb2f5a39553).

The ids were drawn at random. The files are not kept: our builder makes them again, and these are the SHA-256 of the
files that Megatron-LM itself wrote.
"""

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np

from dspark_store.sources.megatron import PairBuilder


@dataclass(frozen=True)
class GoldenPair:
    """What Megatron-LM was given, and the SHA-256 of what it wrote."""

    dtype: str
    lengths: tuple[int, ...]
    boundaries: tuple[int, ...]
    modes: tuple[int, ...] | None
    tokens: tuple[int, ...]
    idx_sha256: str
    bin_sha256: str

    def sequences(self) -> list[list[int]]:
        return [list(self.tokens[start:stop]) for start, stop in pairwise(accumulate(self.lengths, initial=0))]

    def documents(self) -> list[list[int]]:
        """Return the text of each document, without images."""
        modes = self.modes or (0,) * len(self.lengths)
        text = [[] if mode else tokens for tokens, mode in zip(self.sequences(), modes, strict=True)]
        return [[*chain(*text[start:stop])] for start, stop in pairwise(self.boundaries)]

    def build(self, prefix: Path) -> Path:
        """Build the pair with our builder, item by item."""
        with PairBuilder(prefix, dtype=np.dtype(self.dtype), multimodal=self.modes is not None) as builder:
            modes = self.modes or (0,) * len(self.lengths)
            sequences = list(zip(self.sequences(), modes, strict=True))
            for start, stop in pairwise(self.boundaries):
                for tokens, mode in sequences[start:stop]:
                    builder.add_item(tokens, mode)
                builder.end_document()
        return prefix


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


GOLDEN = {
    "uint16": GoldenPair(
        "uint16",
        lengths=(7, 12, 3, 1, 5, 9, 32),
        boundaries=(0, 3, 4, 4, 6, 7),
        modes=None,
        tokens=_ids(
            "56069 28652 7590 11158 31764 11902 46030 47056 57318 22620 10678 16683 55059 38064 19549 35616 408 "
            "8989 39381 28901 49279 33313 0 65535 41234 31955 15584 38410 11690 28397 55610 48321 8955 20651 "
            "21102 37346 24205 49017 34118 53374 51102 10113 54118 14415 33920 30204 21209 45428 54100 29052 "
            "46649 4540 11516 21260 47182 39772 42321 33991 10871 11511 23195 20393 846 42392 2134 32953 32609 "
            "27474 6443"
        ),
        idx_sha256="b23776bde2c1bd671ed83c553bd8edc43b09a2909cafa74f05ade6494b44c1b2",
        bin_sha256="67f586e519e911f402ecbcf2184b8a9f8666f016cba8b38cb47383789475fef7",
    ),
    "int32": GoldenPair(
        "int32",
        lengths=(4, 0, 11, 18, 6, 6, 6, 6, 2, 29, 1),
        boundaries=(0, 3, 4, 8, 8, 9, 11),
        modes=None,
        tokens=_ids(
            "118649 129910 5160 98197 70357 110834 38342 135555 21899 40299 78857 39227 37311 49605 13273 47788 "
            "42512 39562 92303 39961 120550 73322 109516 64124 48350 127169 8622 105187 98445 83707 45774 24827 "
            "60631 129242 33389 77798 90103 137959 27733 70920 110377 119163 131101 7600 30544 21659 21888 97470 "
            "139883 109986 57862 100289 551 56916 69765 142849 59785 135191 130465 69519 131619 91723 103330 "
            "87875 144777 70895 47616 75310 106366 59450 26521 52692 67981 55410 60434 53553 138017 458 120259 "
            "92721 3337 30949 55303 51081 95492 105866 104815 10627 26699"
        ),
        idx_sha256="85709ce1f06cf96d4c61f0b81a9be39aa448766f5557e712524eba40e47c9393",
        bin_sha256="046195f3b568ba63ee938c125733bafc8ba02f64e3b938c34b494db8f219eadc",
    ),
    "multimodal": GoldenPair(
        "int32",
        lengths=(8, 4, 6, 10, 3, 3),
        boundaries=(0, 3, 4, 6),
        modes=(0, 1, 0, 0, 1, 0),
        tokens=_ids(
            "5371 64747 72998 36197 37265 44435 7263 42455 62121 56250 88726 60911 32387 123041 9069 61357 50599 "
            "143789 893 7427 141574 124203 52556 8771 4951 110678 94301 40306 117499 126588 48713 82999 147271 "
            "100961"
        ),
        idx_sha256="22ae496b573d568ea2d6b01d8574eed3281b60214a70b7c9b3d6f33266db3d1c",
        bin_sha256="76b2a617b9bd63fe7d89b591cf182b42cad4c8b911130baa28defb34eadc8564",
    ),
}
