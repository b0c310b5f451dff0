"""Harbor task folders as tasks: task.toml, instruction.md, environment/, tests/test.sh.

The agent works in the folder's own Docker image. A tar of the working directory is its artefact. A
grading unpacks it in a fresh container of that image, and only that one gets the tests (grade.py).

    python grpo.py --task integrations.harbor:path/to/folder
"""

import io
import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import usable
from flatlab.sandbox.backend import WORKSPACE
from flatlab.sandbox.docker import docker_api, docker_problem, short_text
from flatlab.task.definition import Task, refuse_overlap
from flatlab.task.listing import tree_files

# What a sandbox cannot give: keys of task.toml, and files.
REFUSED_KEYS = """environment.tpu environment.mcp_servers environment.healthcheck
    environment.allowed_hosts environment.env agent.network_mode verifier.network_mode verifier.env
    verifier.environment verifier.collect""".split()
REFUSED_FILES = "environment/docker-compose.yaml tests/Dockerfile trajectory.json steps".split()
MEMORY_MB = 4096
BUILD_SECONDS = 600
SECONDS = 600.0  # limit of the tests in the format; here also of one action
ARCHIVE = ".flatlab.tar"
# Equal workspaces make equal archives: names are sorted, times and owners are fixed.
COLLECT = (
    "tar -c --sort=name --mtime='2000-01-01 UTC' --owner=0 --group=0 --numeric-owner "
    f"--hard-dereference --exclude=./{ARCHIVE} . > {ARCHIVE}"
)


def load_task(place: str) -> Task:
    """Loads a Harbor task folder, and builds its image, for which Docker uses its cache.

    Raises UserError if the folder is not complete, if it asks for something that a sandbox cannot
    give, or if Docker cannot provide its image.
    """
    folder = Path(place).resolve()
    with usable(f"The Harbor task {folder}"):
        return read_task(folder)


def read_task(folder: Path) -> Task:
    """See load_task."""
    spec = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    prompt = (folder / "instruction.md").read_text(encoding="utf-8")
    (folder / "tests/test.sh").read_bytes()
    refuse(folder, spec)
    hidden = tree_files(folder / "tests", ".flatlab/tests", "a Harbor task has its tests there")
    if (folder / "environment").is_dir():  # a Dockerfile may copy it into the image
        context = [path for path in (folder / "environment").rglob("*") if path.is_file()]
        refuse_overlap(folder.name, context, hidden.values())
    hidden[".flatlab/grade.py"] = Path(__file__).with_name("grade.py")
    image, workdir = foreign_image(
        folder / "environment",
        folder.name,
        setting(spec, "environment.docker_image"),
        setting(spec, "environment.workdir"),
    )
    for artifact in spec.get("artifacts", []):
        if not str(artifact).startswith(f"{workdir}/"):
            raise UserError(f"{folder} has the artifact {artifact}, not a path below {workdir}.")
    is_offline = setting(spec, "environment.network_mode") == "no-network"
    return Task(
        name=folder.name,
        prompt=f"{prompt.strip()}\n\nThe path {workdir} leads to your workspace.",
        metric="reward",
        higher_is_better=True,
        baseline=0.0,
        reference=1.0,
        artefacts=(ARCHIVE,),
        collect=COLLECT,
        public={},
        hidden=hidden,
        grader=("python3", "-I", ".flatlab/grade.py"),
        splits=("test",),
        step_timeout=float(setting(spec, "agent.timeout_sec", SECONDS)),
        grade_timeout=float(setting(spec, "verifier.timeout_sec", SECONDS)),
        needs_gpu=float(setting(spec, "environment.gpus", 0)) > 0,
        needs_network=not is_offline and setting(spec, "environment.allow_internet", True),
        source="harbor",
        image=image,
    )


def refuse(folder: Path, spec: dict) -> None:
    """Raises UserError if the folder asks for something that a sandbox cannot give."""
    asked = [name for name in REFUSED_FILES if (folder / name).exists()]
    asked += [f"{key} (task.toml)" for key in REFUSED_KEYS if setting(spec, key)]
    if float(setting(spec, "environment.memory_mb", 0)) > MEMORY_MB:
        asked.append(f"more than {MEMORY_MB} MB of memory")
    if asked:
        raise UserError(f"{folder} asks for what a sandbox here lacks: {', '.join(asked)}.")


def setting(spec: dict, key: str, default=None):
    section, name = key.split(".")
    return spec.get(section, {}).get(name, default)


# The working directory of a foreign image becomes the workspace, and its path a link to that.
PREPARE = """
FROM {base}
USER root
RUN for name in python3 bash tar; do command -v $name || exit 1; done
RUN mkdir -p {place} $(dirname {workspace}) && \\
    if ! [ {place} -ef {workspace} ]; then \\
    mv -T {place} {workspace} && ln -s {workspace} {place}; fi
RUN chown -R agent: {workspace} || chown -R 1000:1000 {workspace}
"""


def foreign_image(
    context: Path, task: str, base: str | None = None, workdir: str | None = None
) -> tuple[str, str]:
    """Prepares an image for sandboxes in which commands start in the image's working directory.

    Args:
        context: Folder with a Dockerfile, which is built unless there is a `base`.
        task: Name of the task, for the name of the image.
        base: An image that Docker has.
        workdir: The working directory, if not the image's own.

    Returns the names of the image and of the working directory in it. Raises UserError if Docker
    cannot build it, or if it has no working directory, python3, bash or tar.
    """
    import docker

    if base and (problem := docker_problem(base)):
        raise UserError(problem)
    try:
        client = docker.from_env(timeout=BUILD_SECONDS)
        if base:
            image = client.images.get(base)
        else:
            image = client.images.build(path=str(context), forcerm=True)[0]
        workdir = workdir or image.attrs["Config"]["WorkingDir"]
        if workdir in ("", "/"):
            raise UserError(f"The image of task {task} has no working directory (WORKDIR).")
        text = PREPARE.format(base=image.id, place=shlex.quote(workdir), workspace=WORKSPACE)
        file = io.BytesIO(text.encode())
        image = client.images.build(fileobj=file, forcerm=True, network_mode="none")[0]
        name = f"{repository_name(task)}:{image.id.removeprefix('sha256:')[:16]}"
        image.tag(name)
        remove_others(name)
    except (docker.errors.DockerException, TypeError) as error:  # TypeError: no Dockerfile
        raise UserError(
            f"Docker cannot build the image of task {task}, which must have python3, bash and tar: "
            f"{short_text(error)}"
        ) from error
    return name, workdir


def repository_name(task: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
    return f"flatlab/{name}"


def remove_others(name: str) -> None:
    """Removes the other images of a repository, but for those that a container uses."""
    from docker.errors import APIError

    repository, key = name.split(":")
    for old in docker_api().images(repository):
        for tag in old["RepoTags"] or []:
            if not tag.endswith(f":{key}"):  # podman puts a registry before the repository
                with suppress(APIError):
                    docker_api().remove_image(tag)
