"""Roles are told from names, by one table for all formats."""

import pytest

from flipper.checkpoints.roles import role_of

ROLES = {
    "fc.weight": "parameter",
    "model.bn1.running_mean": "buffer",
    "model.bn1.num_batches_tracked": "buffer",
    "optimizer.fc.weight.exp_avg": "optimizer",
    "opt.state.0.step": "optimizer",
    "state.12.exp_avg_sq": "optimizer",
    "optimizer_state.param_groups.0.lr": "optimizer",
    "optimizer/vars/3": "optimizer",
    "layers/batch_normalization_1/vars/2": "buffer",
    "layers/batch_normalization_1/vars/1": "parameter",
    "layers/dense/vars/2": "parameter",
    "rng.rank0.cpu": "other",
    "progress.step": "other",
    "step": "other",
    "lr_scheduler.last_epoch": "other",
    "state.weight": "parameter",
    "steps.weight": "parameter",
    "updater/optimizer:main/predictor/l1/W/m": "optimizer",
    "updater/model:main/predictor/bn/avg_var": "buffer",
    "updater/model:main/predictor/l1/W": "parameter",
    "updater/iterator:main/order": "other",
    "updater/iteration": "other",
    "optimizer_weights/training/Adam/fc/kernel/m:0": "optimizer",
    "model_weights/bn/bn/moving_variance:0": "buffer",
    "model_weights/fc/fc/kernel:0": "parameter",
}


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_role_of_a_name(name: str, role: str) -> None:
    assert role_of(name) == role
