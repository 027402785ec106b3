"""Which code made a number."""

import subprocess

from experiments import provenance


def test_the_commit_is_that_of_the_projects_own_checkout(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    installed = tmp_path / "env" / "site-packages"
    installed.mkdir(parents=True)
    monkeypatch.setattr(provenance, "ROOT", installed)
    assert provenance._commit() is None  # the repository is the user's own
    monkeypatch.setattr(provenance, "ROOT", tmp_path.resolve())
    commit = provenance._commit()
    assert commit is not None and len(commit) == 12
