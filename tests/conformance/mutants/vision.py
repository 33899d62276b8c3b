"""Planted bugs in vision towers: what a patch attends to, where it is, order of rows, activation."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

QWEN, MODULES = "modes.qwen_vision", "shared.modeling.vision_modules"

bug = bugs_in("vision", "optimized.modes.vision", folder="optimized.")
bug(
    "OneLongImage",
    "A patch attends to patches of other images.",
    (QWEN, "[None].split(angles.lens, dim=2)", "[None].split([sum(angles.lens)], dim=2)"),
)
bug(
    "TurnedAngles",
    "Patches turn as those of the image on its side.",
    (QWEN, "self.angles(each) for each in pixels", "self.angles(each.mT) for each in pixels"),
)
bug("PlainSigmoid", "CLIP's GELU has the factor of SiLU.", ("modes.vision", "(1.702 * y)", "(y)"))

bug = bugs_in("vision", "reference.modes.vision", folder="reference.")
bug(
    "MergersSwapped",
    "Rows for later layers come in the opposite order.",
    (
        MODULES,
        "dict(zip(self.dynamic.deepstack_layers, self",
        "dict(zip(self.dynamic.deepstack_layers[::-1], self",
    ),
)
bug("GridOfCentres", "The grid of positions is stretched from the middle of its cells.",
    (MODULES, "align_corners=True", "align_corners=False"))  # fmt: skip
bug("KeepsTheClassToken", "The class token is a row, and the last patch none.",
    (MODULES, "x = x[:, 1:]", "x = x[:, :-1]"))  # fmt: skip
