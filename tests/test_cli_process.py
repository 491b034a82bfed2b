"""Law: whatever happens to the process, a user sees whole output or one line, and gets the terminal back."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_torchax.cli import main, output

from .checkpoints import save_draft, save_target

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "dflash_torchax"]
SHOW_CURSOR, HIDE_CURSOR = b"\x1b[?25h", b"\x1b[?25l"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_draft(folder / "draft", save_target(folder / "target"))
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


def _environment(**extra):
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "xterm", "JAX_PLATFORMS": "cpu", **extra}


def _run(argv, **options):
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, env=_environment(), timeout=300, **options)


def test_a_closed_pipe_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "study", "scaling", "--json"], stdout=write, stderr=subprocess.PIPE, env=_environment(), timeout=300
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_streams_are_no_crash():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m dflash_torchax study scaling >&- 2>&-"], env=_environment(), timeout=300
    )
    assert done.returncode == 0
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m dflash_torchax generate <&-"],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_no_network_is_one_line():
    for argv in (["generate", "hello", "--target", "no-such-owner/no-such-model"], ["info", "no-such-owner/no-such-model"]):
        done = _run(argv)
        assert (done.returncode, done.stdout) == (1, "")
        *notes, error = done.stderr.splitlines()
        assert error.startswith("dflash-torchax: ")
        assert "no-such-owner/no-such-model" in error
        assert "network" in error
        assert len(notes) <= 1


def test_benchmark_of_public_sets_without_network_is_one_line(models):
    pytest.importorskip("datasets")
    done = subprocess.run(
        [*COMMAND, "benchmark", *models, "--datasets", "gsm8k"],
        capture_output=True,
        text=True,
        timeout=300,
        env=_environment(HF_DATASETS_OFFLINE="1", HF_HOME="/no/such/folder"),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "--prompts FILE.jsonl" in done.stderr


class _InTerminal:
    """The command with stderr (and stdin) on a terminal of its own and stdout in a pipe."""

    def __init__(self, argv, cwd):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *argv],
            stdin=slave,
            stderr=slave,
            stdout=subprocess.PIPE,
            env=_environment(),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""

    def read_until(self, text, timeout=240):
        end = time.monotonic() + timeout
        while text not in self.seen and time.monotonic() < end:
            try:
                chunk = os.read(self.master, 4096)
            except OSError:  # the other side is gone
                break
            if not chunk:
                break
            self.seen += chunk
        return text in self.seen

    def finish(self):
        self.read_until(b"\0never\0", timeout=60)
        code = self.process.wait(timeout=60)
        os.close(self.master)
        return code, self.process.stdout.read()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_benchmark_leaves_no_file_and_restores_the_terminal(models, tmp_path, sent, code):
    run = _InTerminal(
        [
            "benchmark",
            *models,
            "--num-prompts",
            "20",
            "--repeats",
            "1000",
            "--max-new-tokens",
            "8",
            "--json",
            "--output",
            "out.json",
        ],
        tmp_path,
    )
    assert run.read_until(b"dflash-b8"), run.seen
    run.process.send_signal(sent)
    assert run.finish() == (code, b"")
    assert list(tmp_path.iterdir()) == []
    assert b"Traceback" not in run.seen
    assert run.seen.rfind(SHOW_CURSOR) > run.seen.rfind(HIDE_CURSOR)


def test_an_interrupt_that_a_library_swallowed_is_raised_again():
    """Python loses exceptions that a signal raises inside a callback: the next look at it must still end the command."""
    with output.tidy_terminal():
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        with pytest.raises(KeyboardInterrupt):
            output.check_interrupted()
    with output.tidy_terminal():
        output.check_interrupted()


def _fails(*_):
    raise RuntimeError("no plot today")


def test_a_failing_plot_leaves_the_json(capsys, monkeypatch, tmp_path):
    from dflash_torchax.aot import pair as aot_pair
    from dflash_torchax.aot import plots as aot_plots
    from dflash_torchax.benchmark import plots
    from dflash_torchax.cli import compile as compile_command
    from dflash_torchax.cli import k_flat

    for module, name in ((aot_plots, "programs"), (aot_plots, "widths"), (plots, "scaling")):
        monkeypatch.setattr(module, name, _fails)
    monkeypatch.setattr(k_flat, "study", lambda *_: {"rows": []})
    monkeypatch.setattr(aot_pair, "compile_pair", lambda *_, **__: {"programs": []})
    monkeypatch.setattr(compile_command, "_modules", lambda args: (None, None))
    for module in (k_flat, compile_command):
        monkeypatch.setattr(module, "_show", lambda document: None)
    file, plot = tmp_path / "out.json", ("--plot", tmp_path / "p.svg")
    for argv in (
        ["study", "scaling", "--output", file],
        ["study", "k-flat", "--output", file],
        ["compile", "--preset", "qwen3-4b", "--json", file],
    ):
        assert main([str(word) for word in (*argv, *plot)]) == 1
        assert "no plot today" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["out.json"], argv
        assert json.loads(file.read_text())
        file.unlink()


def test_a_missing_matplotlib_is_told_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = ("--plot", str(tmp_path / "p.svg"))
    for argv in (["study", "scaling", *plot], ["study", "k-flat", *plot], ["compile", "--preset", "qwen3-4b", *plot]):
        assert main(argv) == 1
        assert capsys.readouterr().err.startswith("dflash-torchax: --plot: matplotlib is missing")


def test_ctrl_c_ends_a_generation_with_the_text_so_far(models, tmp_path):
    run = _InTerminal(["generate", "w7", *models, "--max-new-tokens", "480"], tmp_path)
    first = run.process.stdout.read(4)
    run.process.send_signal(signal.SIGINT)
    code, rest = run.finish()
    assert code in (0, 130)  # 0 where the tiny model was faster than the signal
    assert (first + rest).startswith(b"w")
    assert b"Traceback" not in run.seen


def test_chat_in_a_terminal_answers_and_leaves_on_end_of_input(models, tmp_path):
    run = _InTerminal(["chat", *models, "--max-new-tokens", "8"], tmp_path)
    assert run.read_until(b"/exit leaves")
    os.write(run.master, b"w7 w8\n")
    assert run.read_until(b"prompt tokens read"), run.seen
    os.write(run.master, b"\x04")
    code, out = run.finish()
    assert code == 0
    assert out.count(b"w") >= 8


def test_python_m_and_exit_code_reach_the_shell():
    assert _run(["--version"]).stdout.startswith("dflash-torchax ")
    assert _run(["nonsense"]).returncode == 2
    done = _run(["study", "scaling", "--json"])
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "scaling"
