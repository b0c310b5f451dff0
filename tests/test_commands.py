"""Commands for files as agents type them, edits in replies, images for a task, and an episode by hand, in real sandboxes."""

import subprocess
import sys
from dataclasses import replace

import pytest

import env
from backends import EVERYWHERE, ISOLATED, backends, needs_docker
from env import Env, check_needs
from flatlab.episode.actions import extract_action, lift_bodies, typed_edits, unfinished
from flatlab.errors import SandboxFault, UserError
from flatlab.sandbox import docker
from flatlab.sandbox.sandbox import IMAGE, Sandbox
from flatlab.sandbox.warm_pool import SPARES
from helpers import PROJECT
from tasks import load_task


@pytest.fixture(scope="module", params=EVERYWHERE)
def world(request):
    with Env(
        replace(load_task("battleOfSexes", "", ""), step_timeout=30.0), request.param
    ) as world:
        world.reset()
        yield world


@pytest.fixture(autouse=True)
def clean_workspace(request):
    """Each test finds no file of another one, and no file open."""
    if "world" in request.fixturenames:
        request.getfixturevalue("world").step(block("cd ~/workspace; rm -rf ./* ~/.window.json"))


def block(text):
    return f"```bash\n{text}\n```"


def do(world, text):
    step = world.step(block(text))
    return step.observation, step.status


def put(world, **files):
    world.sandbox.put({name.replace("_", "."): text.encode() for name, text in files.items()})


def said(world, text):
    return do(world, text)[0]


LONG = "".join(f"line {n}\n" for n in range(1, 251))

# ---------------------------------------------------------------------------------------------- looking


def test_open_goto_and_scrolling(world):
    put(world, long_txt=LONG)
    path = f"{world.sandbox.workspace}/long.txt"
    shown = said(world, "open long.txt").split("\n")
    assert shown[:2] == [f"[File: {path} (250 lines total)]", "1:line 1"] and shown[-2:] == [
        "100:line 100",
        "(150 more lines below)",
    ]
    shown = said(world, "scroll_down").split("\n")
    assert (
        shown[1:3] == ["(98 more lines above)", "99:line 99"]
        and shown[-1] == "(52 more lines below)"
    )
    assert said(world, "scroll_down; scroll_down").endswith("250:line 250")
    assert "149 more lines above" not in said(
        world, "goto 250"
    ) and "(150 more lines above)" in said(world, "goto 250")
    assert (
        "53:line 53\n" in said(world, "scroll_up")
        and said(world, "scroll_up").split("\n")[1] == "1:line 1"
    )
    assert "\n120:line 120\n" in said(
        world, "open long.txt 120"
    ) and "(103 more lines above)" in said(world, "goto 120")
    assert do(world, "goto 251") == (
        "There is no line 251: the file has 250 lines.\n[exit code 1]",
        "error",
    )
    assert "must be a number" in said(world, "goto x") and "Use: goto <line>" in said(world, "goto")
    assert "beyond the end" in said(world, "open long.txt 999")


def test_what_cannot_be_opened_is_said(world):
    assert do(world, "goto 1") == ("No file is open. Use: open <file>\n[exit code 1]", "error")
    assert "No such file" in said(world, "open absent") and "is a folder" in said(world, "open .")
    put(world, binary="a\0b")
    assert "not a text file" in said(world, "open binary") and "Use: open <file>" in said(
        world, "open"
    )


def test_searching(world):
    world.sandbox.put(
        {
            "a.py": b"x = 1\ny = foo(x)\n",
            "deep/b.py": b"foo(1)\nfoo(2)\n",
            ".hidden": b"foo\n",
            "c.txt": b"bar\n",
        }
    )
    place = world.sandbox.workspace
    assert (
        said(world, "search_dir foo")
        == f"3 lines with 'foo' in {place}:\n{place}/a.py (1 lines)\n{place}/deep/b.py (2 lines)"
    )
    assert said(world, "search_dir 'foo(2)' deep").endswith(f"{place}/deep/b.py (1 lines)")
    assert do(world, "search_dir nothing") == (
        f"'nothing' is nowhere in {place}.\n[exit code 1]",
        "error",
    )
    assert (
        said(world, "search_file foo deep/b.py")
        == f"2 lines with 'foo' in {place}/deep/b.py:\nLine 1:foo(1)\nLine 2:foo(2)"
    )
    assert "No file is open" in said(world, "search_file foo")
    assert said(world, "open a.py >/dev/null; search_file y").endswith("Line 2:y = foo(x)")
    assert said(world, "find_file '*.py'").split("\n")[1:] == [
        f"{place}/a.py",
        f"{place}/deep/b.py",
    ]
    assert "No file" in said(world, "find_file '*.py' /tmp") and "no folder" in said(
        world, "find_file x absent"
    )
    put(world, many_txt="foo\n" * 200)
    assert "look for something more special" in said(world, "search_file foo many.txt")


# ---------------------------------------------------------------------------------------------- changing


def test_create_insert_and_edit(world):
    assert (
        said(world, "create new.py")
        == f"[File: {world.sandbox.workspace}/new.py (1 lines total)]\n1:"
    )
    shown = said(world, "insert 0\ndef f(x):\n  return x\nend_of_insert")  # 2 spaces are fine
    assert "1:def f(x):\n2:  return x\n3:" in shown and "was changed" in shown
    said(world, "edit 2:3\n  y = x + 1\n\n  return y\nend_of_edit\necho then")
    assert world.sandbox.get("new.py") == b"def f(x):\n  y = x + 1\n\n  return y\n"
    said(world, "edit 1:4\nend_of_edit")  # nothing: they are deleted
    assert world.sandbox.get("new.py") == b""
    assert "exists already" in said(world, "create new.py") and "It is a folder" in said(
        world, "mkdir d; create d"
    )
    assert "no lines 5 to 6" in said(world, "edit 5:6\nx\nend_of_edit") and "no line 9" in said(
        world, "insert 9\nx\nend_of_insert"
    )
    assert "cannot be created" in said(world, "create absent/x.py")
    assert "lines of their own" in said(world, "insert 0 x = 1")


def test_bodies_as_heredocs_and_two_in_one_block(world):
    said(world, "create a.txt")
    shown = do(
        world,
        "edit 1:1 <<'end_of_edit'\none\nend_of_edit\ninsert 1 <<end_of_insert\ntwo $HOME\nend_of_insert\ncat a.txt",
    )
    assert shown[0].endswith("one\ntwo $HOME") and shown[1] == "ok"


def test_bodies_pass_no_shell(world):
    text = "$(touch pwned) `touch pwned` ${HOME} \\$x 'it' \"s\" \\\\ !! # ~ * \\\n```\n```bash\n  EOF\nüñí 日本 \ttab\n'unclosed \"quotes $((\n<<EOF"
    said(world, "create notes.md")
    assert do(world, f"edit 1:1\n{text}\nend_of_edit")[1] == "ok"
    assert world.sandbox.get("notes.md").decode() == text + "\n" and said(world, "ls") == "notes.md"
    assert do(world, f"insert 1\n{text}\nend_of_insert")[1] == "ok" and "touch" not in said(
        world, "cat /proc/self/environ; ls"
    )


def test_a_syntax_error_in_python_is_refused(world):
    put(world, a_py="def f():\n    return 1\n\nprint(f())\n", a_txt="x\n")
    said(world, "open a.py")
    for body, message in (
        ("    return (1", "SyntaxError"),
        ("  return 1\n    x = 2", "IndentationError"),
        ("    return = 3", "SyntaxError"),
    ):
        text, status = do(world, f"edit 2:2\n{body}\nend_of_edit")
        assert (
            status == "error"
            and "The edit was not made" in text
            and message in text
            and "2:    return 1" in text
            and body.split("\n")[0] in text
        )
    assert world.sandbox.get("a.py") == b"def f():\n    return 1\n\nprint(f())\n"
    assert do(world, "open a.txt\nedit 1:1\nreturn = 3\nend_of_edit")[1] == "ok"
    put(world, bad_py="x = (\n\ny = 1\n")  # a file that was wrong before can be mended in steps
    assert do(world, "open bad.py\nedit 3:3\ny = 2\nend_of_edit")[1] == "ok"


def test_read_only_files_and_odd_bytes(world):
    said(world, "printf 'a\\377b\\r\\nc' > odd; open odd\ninsert 2\nnew\nend_of_insert")
    assert world.sandbox.get("odd") == b"a\xffb\r\nc\nnew\n"
    assert (
        "read-only" in said(world, "chmod 444 odd\nedit 1:1\nx\nend_of_edit")
        or said(world, "id -u").strip() == "0"
    )


def test_commands_are_there_after_reset_and_in_a_copy(world):
    for again in range(2):
        put(world, a_txt="one\n")
        assert (
            "1:one" in said(world, "open a.txt")
            and do(world, "insert 1\ntwo\nend_of_insert")[1] == "ok"
        )
        with world.fork() as twin:  # with the open file
            assert (
                "2:two" in said(twin, "goto 1")
                and do(twin, "edit 1:1\nONE\nend_of_edit")[1] == "ok"
            )
            assert (
                twin.sandbox.get("a.txt") == b"ONE\ntwo\n"
                and world.sandbox.get("a.txt") == b"one\ntwo\n"
            )
        world.reset()
    assert "No file is open" in said(world, "scroll_down")


# ---------------------------------------------------------------------------------------------- edits in replies

BODY = "x = '''\n```\n$(rm) `x`\n'''\n"


def lifted(text):
    """What is left of a block's text, and the bodies of its edits."""
    action, problem = extract_action(typed_edits(f"Some text, it's mine.\n{block(text)}\nMore."))
    assert not problem, problem
    return lift_bodies(action)


@pytest.mark.parametrize(
    "text, command, bodies",
    [
        (f"edit 1:2\n{BODY}end_of_edit", "edit 1:2 --body 0", [BODY]),
        (
            f"open a.py\n  insert 3  \n{BODY}end_of_insert  \nls",
            "open a.py\n  insert 3 --body 0\nls",
            [BODY],
        ),
        (
            f'edit 1:2\nend_of_edit\nedit 3:4 << "end_of_edit"\n{BODY}end_of_edit',
            "edit 1:2 --body 0\nedit 3:4 --body 1",
            ["", BODY],
        ),
        ("edit 1:2\na\nend_of_insert", "edit 1:2 --body 0", ["a\n"]),  # the wrong word ends it, too
        (
            "cat > n.md <<'X'\nedit 1:2\na\nend_of_edit\nX",
            "cat > n.md <<'X'\nedit 1:2\na\nend_of_edit\nX",
            [],
        ),
        (
            "cat > n.md <<X\nedit 1:2 <<'end_of_edit'\na\nend_of_edit\nX\nedit 5:5\nb\nend_of_edit",
            "cat > n.md <<X\nedit 1:2 <<'end_of_edit'\na\nend_of_edit\nX\nedit 5:5 --body 0",
            ["b\n"],
        ),
        ("echo 'type\nedit 1:2\na\nend_of_edit\n'", "echo 'type\nedit 1:2\na\nend_of_edit\n'", []),
        (
            'edit 1:2\ncat <<X\nend_of_edit\necho "<<X"',
            'edit 1:2 --body 0\necho "<<X"',
            ["cat <<X\n"],
        ),
        ("edit 1:2 x\na\nend_of_edit", "edit 1:2 x\na\nend_of_edit", []),
        ("echo end_of_edit", "echo end_of_edit", []),
        ("edit 1:2\nnever ends", "edit 1:2\nnever ends", []),
    ],
)
def test_edits_lose_their_bodies_and_nothing_else_does(text, command, bodies):
    assert lifted(text) == (command, bodies)


def test_thoughts_and_prose_are_left_alone():
    thought = "<think>it's\n```bash\nedit 1:1\nx\nend_of_edit\n</think>\n"
    assert extract_action(typed_edits(thought + block("edit 2:2\n```\nend_of_edit"))) == (
        "edit 2:2 <<'end_of_edit'\n```\nend_of_edit",
        "",
    )
    prose = "Type this:\nedit 1:2\na\nend_of_edit\n" + block("ls")
    assert typed_edits(prose) == prose


def test_a_heredoc_that_holds_an_edit_is_written_as_it_is(world):
    said(world, "cat > n.md <<'X'\nopen a\nedit 1:2\nnew $x\nend_of_edit\nX")
    assert world.sandbox.get("n.md") == b"open a\nedit 1:2\nnew $x\nend_of_edit\n"


def test_many_edits_take_no_time():
    for text in (
        "edit 1:2\n" * 20_000 + "end_of_edit",
        "edit 1:2 <<end_of_edit\n" + "end_of_insert\n" * 20_000,
        "edit 1:2\nend_of_edit\n" * 10_000,
    ):
        lift_bodies(text), typed_edits(block(text)), unfinished(text)


@pytest.mark.parametrize(
    "text, waits",
    [
        ("ls", False),
        ("cat <<X", True),
        ("cat <<X\na", True),
        ("cat <<X\na\nX", False),
        ("echo 'a", True),
        ("echo 'a\nb'", False),
        ("echo $(ls", True),
        ("edit 1:2", True),
        ("edit 1:2\na", True),
        ("edit 1:2\na'\nend_of_edit", False),
        ("insert 3\nend_of_insert", False),
        ("edit 1:2 <<end_of_edit", True),
        ("edit 1:2 <<end_of_edit\nend_of_edit", False),
        ("cat <<X\nedit 1:2\nX", False),
        ("cat <<X\nedit 1:2", True),
        ("edit 1:2\na\nend_of_edit\ninsert 3", True),
    ],
)
def test_unfinished_lines_by_hand(text, waits):
    assert unfinished(text) == waits


# ---------------------------------------------------------------------------------------------- needs


def test_needs_are_honoured_or_refused(tmp_path, monkeypatch):
    task = load_task("titanic", "", "")
    check_needs(task, "local")
    online = replace(task, needs_network=True)
    with pytest.raises(
        UserError,
        match="takes data from the network.*--network, or mount what it needs with --hf-cache",
    ):
        check_needs(online, "docker")
    with pytest.raises(UserError, match="allow it with --network.$"):
        check_needs(online, "local", hf_cache=str(tmp_path))
    check_needs(online, "local", network=True)
    check_needs(online, "docker", hf_cache=str(tmp_path))
    with pytest.raises(UserError, match="no folder .*absent"):
        check_needs(online, "docker", hf_cache=str(tmp_path / "absent"))
    with pytest.raises(UserError, match="only Docker gives one"):
        check_needs(replace(task, needs_gpu=True), "local")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(env.Path, "exists", lambda self: False)
    with pytest.raises(UserError, match="no /dev/nvidiactl"):
        check_needs(replace(task, needs_gpu=True), "docker")


CONNECT = "python3 -c \"import socket; s = socket.socket(2, 2); s.connect(('192.0.2.1', 9)); print(s.getsockname()[0])\""


@pytest.mark.parametrize("backend", ISOLATED)
def test_network_is_there_for_tasks_that_need_it_and_only_with_the_flag(backend):
    task = load_task("titanic", "", "")
    online = replace(task, needs_network=True)
    for what, allowed in ((online, True), (task, True), (task, False)):
        with Env(what, backend, network=allowed) as world:
            assert ("without network" in world.reset()) == (not what.needs_network)
            assert (
                do(world, "ls /sys/class/net /proc/net/dev; cat /proc/net/dev")[0].count(":") > 3
            ) == what.needs_network or do(world, CONNECT)[1] == "ok"
            if not what.needs_network:
                assert do(world, CONNECT)[1] == "error"


@needs_docker
def test_hf_cache_is_mounted_read_only_and_found(tmp_path):
    (tmp_path / "hub/models--x").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "hub/models--x/config.json").write_text("{}")
    with Env(
        replace(load_task("titanic", "", ""), needs_network=True), "docker", hf_cache=str(tmp_path)
    ) as world:
        assert "without network" in world.reset()
        assert (
            said(world, "cat $HF_HOME/hub/models--x/config.json; echo; echo $HF_HUB_OFFLINE")
            == "{}\n1"
        )
        assert (
            do(
                world,
                "touch $HF_HOME/hub/new $HF_HOME/hub/models--x/lock && echo x > $HF_HOME/hub/models--x/config.json",
            )[1]
            == "error"
        )
        assert said(world, "ls $HF_HOME/hub").split() == ["models--x", "new"]
    assert (tmp_path / "hub/models--x/config.json").read_text() == "{}" and not (
        tmp_path / "hub/new"
    ).exists()


# ---------------------------------------------------------------------------------------------- images for a task

PIP = """import os, sys
if "broken" in sys.stdin.read():
    sys.exit("no such package")
for folder in sys.path:
    if "packages" in folder and os.path.isdir(folder):
        os.makedirs(folder + "/flatlab_test-1.0.dist-info")
        open(folder + "/flatlab_test-1.0.dist-info/METADATA", "w").write("Metadata-Version: 2.1\\nName: flatlab-test\\nVersion: 1.0\\n")
        break
"""


@pytest.fixture
def big_task(tmp_path):
    (tmp_path / "big.bin").write_bytes(b"7" * (9 << 20))
    yield replace(
        load_task("titanic", "", ""),
        name="flatlab test",
        public={"data/big.bin": tmp_path / "big.bin"},
    )
    api = docker.docker_api()
    for image in api.images("flatlab/flatlab-test"):
        for tag in image["RepoTags"]:
            api.remove_image(tag, force=True)


@needs_docker
def test_large_files_are_baked_into_one_image_once(big_task, monkeypatch):
    small = load_task("titanic", "", "")
    assert docker.prepared_image(small, IMAGE, False, None) == IMAGE  # nothing to prepare
    with Env(big_task, "docker") as world:
        assert "data/big.bin (9437184 bytes)" in world.reset() and world.sandbox.image.startswith(
            "flatlab/flatlab-test:"
        )
        assert do(world, "echo x >> data/big.bin; ls -l data")[1] == "ok"
        first = world.sandbox.image
    for name in ("build_image", "content_key"):
        monkeypatch.setattr(docker, name, lambda *_: pytest.fail("looked for again"))
    with Env(big_task, "docker") as world:
        world.reset()
        assert world.sandbox.image == first and said(world, "stat -c %s data/big.bin") == str(
            9 << 20
        )
    monkeypatch.undo()
    docker.prepared.clear()  # as a later process
    monkeypatch.setattr(docker, "build_image", lambda *_: pytest.fail("built again"))
    assert docker.prepared_image(big_task, IMAGE, False, None) == first
    monkeypatch.undo()
    docker.docker_api().remove_image(first, force=True)  # by somebody else
    with Env(big_task, "docker") as world:
        SPARES.close()
        with pytest.raises(SandboxFault):
            world.reset()
        assert "data/big.bin" in world.reset()
    path = big_task.public["data/big.bin"]
    path.write_bytes(b"8" * (9 << 20))  # another content: another image
    docker.prepared.clear()
    with Env(big_task, "docker") as world:
        world.reset()
        assert world.sandbox.image != first and said(world, "head -c 3 data/big.bin") == "888"


@needs_docker
def test_requirements_are_installed_once_or_named(big_task, tmp_path):
    needed = tmp_path / "requirements.txt"
    needed.write_text("# ours\nnumpy>=1\nflatlab-test==1.0  # not there\n-e git+x\n")
    task = replace(big_task, public={}, requirements=needed)
    assert docker.requirement_names(needed) == ["numpy", "flatlab-test"]
    with pytest.raises(
        UserError,
        match="needs the packages in .*requirements.txt; with --network they are installed once",
    ):
        Env(task, "docker").reset()
    box = Sandbox("docker")
    assert docker.missing_requirements(box, task) == ["flatlab-test"]
    box.close()

    def with_pip(network):  # the stand-in of the image has none
        box = Sandbox("docker")
        box.put({"pip/__main__.py": PIP.encode()})
        return box

    name = docker.prepared_image(task, IMAGE, True, with_pip)
    assert name.startswith("flatlab/flatlab-test:")
    box = Sandbox("docker", image=name)
    assert docker.missing_requirements(box, task) == []
    box.close()
    needed.write_text("broken\n")
    docker.prepared.clear()
    with pytest.raises(UserError, match="cannot be installed in the image .no such package"):
        docker.prepared_image(task, IMAGE, True, with_pip)


@pytest.mark.parametrize("backend", backends("namespaces", "landlock"))
def test_missing_requirements_of_a_local_sandbox_are_named(tmp_path, backend):
    (tmp_path / "requirements.txt").write_text("flatlab-nowhere\n")
    with pytest.raises(UserError, match="needs the packages"):
        Env(
            replace(load_task("titanic", "", ""), requirements=tmp_path / "requirements.txt"),
            backend,
        ).reset()


# ---------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize("backend", backends("docker", "local"))
def test_an_episode_by_hand(backend):
    lines = [
        "create strategy.py",
        "edit 1:1",
        "def row_strategy(history):",
        "  return 0",
        "end_of_edit",
        "cat <<X",
        "it's",
        "X",
        "no_such",
        "validate",
    ]
    done = subprocess.run(
        [sys.executable, "env.py", "--task", "battleOfSexes", "--backend", backend],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "[sandbox: ",
        "Files:",
        "1:def row_strategy(history):",
        "it's\n[ok, ",
        "[exit code 127]\n[error, ",
        "$ validate\nvalidation Score: 1.4",
        "$ no_such\n",
        "submit",
        "[submit, ",
        "\nvalidation part: Score 1.4",
        "\ntest part: Score 1.4",
    ):
        assert words in done.stdout, words


def test_bad_input_by_hand_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "env.py", "--task", "titanik"],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=60,
    )
    assert (
        done.returncode == 2
        and "did you mean titanic" in done.stderr
        and len(done.stderr.strip().split("\n")) == 1
    )


def test_a_broken_sandbox_by_hand_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(Env, "reset", lambda self: (_ for _ in ()).throw(SandboxFault("no daemon")))
    with pytest.raises(SandboxFault, match="no daemon"):
        env.by_hand("titanic", "local")


def test_lines_are_read_until_all_is_closed(monkeypatch):
    lines = iter(["edit 1:2", "a", "end_of_edit", "never"])
    prompts = []

    def ask(prompt):
        prompts.append(prompt)
        return next(lines)

    assert env.read_block(ask) == "edit 1:2\na\nend_of_edit" and prompts == ["$ ", "> ", "> "]
