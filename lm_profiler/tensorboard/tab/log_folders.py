"""The folders that the tab may read, and the names of the runs in them, which are those that TensorBoard shows.

These are the folders of ``--logdir`` or ``--logdir_spec``, and the targets of links in them: TensorBoard follows such
links too, and recommends a folder of links for runs in several places. A link inside a run's own folder is not
followed, so that a run that was copied from elsewhere cannot show files of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorboard.errors import InvalidArgumentError, NotFoundError
from tensorboard.plugins.base_plugin import TBContext

from lm_profiler.record.files import real_path
from lm_profiler.record.sweep_files import PLAN_FILE

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunsFolder:
    """A log folder, or the folder of one run."""

    name: str  # the beginning of the names of its runs
    folder: Path
    # the real folders in which its files may be; files elsewhere are never read
    allowed_roots: tuple[Path, ...]

    def file(self, name: str) -> Path:
        """Return the real path of the file or folder ``name`` below this folder."""
        return path_inside(self.folder / name, self.allowed_roots)


class LogFolders:
    """TensorBoard's log folders by the first part of the names of their runs, which is empty for ``--logdir``."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders

    @classmethod
    def from_context(cls, context: TBContext) -> LogFolders:
        """Return the folder of ``--logdir``, or else those that ``--logdir_spec`` lists with their names."""
        if context.logdir:
            no_name = ""
            return cls({no_name: Path(context.logdir)})
        spec = getattr(context.flags, "logdir_spec", "")
        return cls(_folders_in_spec(spec or ""))

    @property
    def title(self) -> str:
        """The log folders as a page names them."""
        return ", ".join(str(folder) for folder in self._folders.values())

    def check(self) -> None:
        """Raise InvalidArgumentError if there is no folder of this machine."""
        are_here = all(folder.is_dir() for folder in self._folders.values())
        if not self._folders or not are_here:
            raise InvalidArgumentError(
                "The LM Profiler tab needs --logdir or --logdir_spec with folders on TensorBoard's own machine."
            )

    def has_runs(self) -> bool:
        """Return whether there is a run or a sweep in any of the folders."""
        for runs_folder in self.runs_folders():
            for _, _, files in os.walk(runs_folder.folder):
                if RUN_FILE in files or PLAN_FILE in files:
                    return True
        return False

    def runs_folders(self) -> list[RunsFolder]:
        """Return the log folders, followed by the targets of links in them, each once."""
        self.check()
        runs_folders = []
        for name, folder in self._folders.items():
            runs_folders.append(RunsFolder(name, folder, (real_path(folder),)))
        real_folders = {real_path(folder) for folder in self._folders.values()}
        for runs_folder in runs_folders:
            # The list grows during the loop, because the targets of links may contain further links.
            for link in _links_to_folders(runs_folder.folder):
                real_folder = real_path(link)
                if real_folder in real_folders:
                    continue
                real_folders.add(real_folder)
                path_below = link.relative_to(runs_folder.folder)
                name = str(Path(runs_folder.name) / path_below)
                # Files below the link may be in its target, or in the folders that contain the link.
                allowed_roots = (*runs_folder.allowed_roots, real_folder)
                runs_folders.append(RunsFolder(name, link, allowed_roots))
        return runs_folders

    def run(self, name: str) -> RunsFolder:
        """Return the folder of the run called ``name``; raise NotFoundError if there is none.

        The target of a link above the run may be read, that of a link within the run may not.
        """
        self.check()
        top, parts = self._split(name)
        folder = self._folders[top]
        allowed_roots = [real_path(folder)]
        is_in_run = False  # whether ``folder`` is in a run or a sweep
        try:
            for part in parts:
                if part in ("", os.pardir):
                    raise NotFoundError(f"{name!r}: no run of that name")
                if (folder / RUN_FILE).exists() or (folder / PLAN_FILE).exists():
                    is_in_run = True
                folder = folder / part
                if folder.is_symlink() and not is_in_run:
                    allowed_roots.append(real_path(folder))
            if not folder.is_dir():
                raise NotFoundError(f"{name!r}: no run of that name")
        except (OSError, ValueError):  # a name that no folder can have
            raise NotFoundError(f"{name!r}: no run of that name") from None
        runs_folder = RunsFolder(name, folder, tuple(allowed_roots))
        # raises NotFoundError if the file is outside of the allowed folders
        runs_folder.file(RUN_FILE)
        return runs_folder

    def _split(self, name: str) -> tuple[str, list[str]]:
        """Return the log folder's name and the parts of the path below it."""
        if "" in self._folders:
            if name == os.curdir:
                return "", []
            return "", name.split("/")
        for top in self._folders:
            if name == top:
                return top, []
            if name.startswith(f"{top}/"):
                return top, name.removeprefix(f"{top}/").split("/")
        raise NotFoundError(f"{name!r}: no run of that name")


def _folders_in_spec(spec: str) -> dict[str, Path]:
    """Return the folders of ``--logdir_spec=name:folder,name:folder``; a folder without a name is named by its path."""
    folders = {}
    for part in spec.split(","):
        if not part:
            continue
        name, separator, path = part.partition(":")
        if not separator or part.startswith("/"):
            name = path = part
        folders[name] = real_path(Path(path).expanduser())
    return folders


def _links_to_folders(top: Path) -> Iterator[Path]:
    """Yield the links to folders below ``top``, outside of runs and sweeps."""
    for parent, folders, files in os.walk(top):
        if RUN_FILE in files or PLAN_FILE in files:
            folders.clear()  # so that ``os.walk`` does not enter them
            continue
        for name in sorted(folders):
            link = Path(parent) / name
            if link.is_symlink():
                yield link


def path_inside(path: Path, allowed_roots: tuple[Path, ...]) -> Path:
    """Return the real path of ``path``, with links followed; NotFoundError if it lies outside ``allowed_roots``."""
    not_found = NotFoundError(f"{path.name!r}: nothing of that name in the folder")
    try:
        real_path = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        # there is none; links in a circle; a NUL in the name
        raise not_found from None
    if not any(real_path.is_relative_to(root) for root in allowed_roots):
        raise not_found
    return real_path
