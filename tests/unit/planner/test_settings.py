"""Settings become targets and rules; what contradicts itself stops the start."""

import pytest

from services.common.settings import SettingsError
from services.planner.config import PlannerSettings
from services.planner.core.policy import PolicyConfig
from services.planner.core.targets import Targets
from services.planner.core.watch import WatchConfig


def test_defaults_are_the_cores() -> None:
    settings = PlannerSettings.load([])
    assert settings.policy_config() == PolicyConfig()
    assert settings.watch_config() == WatchConfig()
    assert not settings.dry_run


def test_flags_reach_the_core() -> None:
    settings = PlannerSettings.load(
        [
            "--ttft-s",
            "0.5",
            "--itl-ms",
            "20",
            "--quantile",
            "0.99",
            "--hold",
            "7",
            "--models",
            "a,b",
        ]
    )
    assert settings.targets() == Targets(0.5, 0.02, 0.99)
    assert settings.policy_config().hold == 7
    assert settings.models == ("a", "b")


def test_a_band_upside_down_stops_the_start() -> None:
    with pytest.raises(SettingsError, match=r"low \(0.9\) must be below high \(0.8\)"):
        PlannerSettings.load(["--low", "0.9", "--high", "0.8"])


@pytest.mark.parametrize("flags", [["--ttft-s", "0"], ["--quantile", "1"], ["--hold", "0"]])
def test_impossible_values_name_the_setting(flags: list[str]) -> None:
    with pytest.raises(SettingsError, match=flags[0].removeprefix("--").replace("-", "_")):
        PlannerSettings.load(flags)


def test_impossible_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="can't be targets"):
        Targets(0.0, 1.0)
