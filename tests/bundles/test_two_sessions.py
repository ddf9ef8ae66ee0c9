"""Two models that train each other: each has a session, and reads the other's weights of now.

critic.step(real and made rows)  ──weights──▶  generator's loss   generator.step(noise)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam

import bigbrain_fx as bb
from tests.support.command_line import write_cluster

ROWS, STEPS = 8, 4


def labelled(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return binary_cross_entropy_with_logits(output, batch["label"])


class Game:
    """A generator and a critic, whose weights are clamped after each of its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.of_generator = Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
        self.of_critic = Adam(self.critic.parameters(), lr=1e-2, betas=(0.5, 0.999))

    def fooled(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return binary_cross_entropy_with_logits(self.critic(output), batch["label"])

    def clamp(self) -> None:
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    def rows(self, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            made = self.generator(noise)
        label = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])
        return {"input": torch.cat([real, made]), "label": label}

    def weights(self) -> list[Tensor]:
        return [*self.generator.state_dict().values(), *self.critic.state_dict().values()]


def drawn() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 4, generator=dice) + 2, torch.randn(ROWS, 3, generator=dice))
        for _ in range(STEPS)
    ]


def noise_of(noise: Tensor) -> dict[str, Tensor]:
    return {"input": noise, "label": torch.ones(ROWS, 1)}


def plain(*, clamps: bool) -> Game:
    game = Game()
    for real, noise in drawn():
        rows = game.rows(real, noise)
        game.of_critic.zero_grad()
        labelled(game.critic(rows["input"]), rows).backward()
        game.of_critic.step()
        if clamps:
            game.clamp()
        game.of_generator.zero_grad()
        game.fooled(game.generator(noise), noise_of(noise)).backward()
        game.of_generator.step()
    return game


@pytest.mark.parametrize(
    ("order", "count"),
    [(["critic", "generator"], 1), (["generator", "critic"], 1), (["critic", "generator"], 2)],
)
@pytest.mark.gate("order2-2")
def test_a_game_of_two_sessions_is_that_of_plain_pytorch(
    order: list[str], count: int, tmp_path: Path
) -> None:
    """The loss of the second is traced, and its parts compared, while the first watches."""
    game, machine = Game(), bb.machine(write_cluster(tmp_path))
    real, noise = drawn()[0]
    about: Any = {"rehearse": False, "options": bb.Options("naive", micro_batches=count)}
    made: dict[str, Any] = {
        "generator": {"loss": game.fooled, "optimizer": game.of_generator},
        "critic": {"loss": labelled, "optimizer": game.of_critic},
    }
    examples = {"generator": noise_of(noise), "critic": game.rows(real, noise)}
    with ExitStack() as stack:
        sessions = {}
        for name in order:
            session = machine(
                getattr(game, name), example_batch=examples[name], **made[name], **about
            )
            sessions[name] = stack.enter_context(session)
        for real, noise in drawn():
            sessions["critic"].step(game.rows(real, noise))
            game.of_critic.step()  # it does nothing
            if count == 1:  # else the first to read the critic's weights is the comparison
                game.clamp()
            sessions["generator"].step(noise_of(noise))
        assert all(session.plan.stages.devices for session in sessions.values())
    off = 0.0 if count == 1 else 1e-5
    for one, other in zip(plain(clamps=count == 1).weights(), game.weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=off)
