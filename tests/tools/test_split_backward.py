"""What waits for weights is what a forward keeps, and split gradients are the same bits."""

from __future__ import annotations

import json

from click.testing import CliRunner

from tools.split_backward import main


def test_a_split_backward_holds_what_the_forward_held() -> None:
    done = CliRunner().invoke(main, ["--blocks", "1", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["same_bits"]
    assert 0.98 < found["bytes_after_backward"] / found["bytes_after_forward"] <= 1.0
    assert found["w_ms"] > 0
