# What several stages use. No rules here.

WORK = ".work"


def repository_files(pattern):
    """Files that match a glob, relative to the repository, sorted."""
    return sorted(str(p.relative_to(REPO)) for p in REPO.glob(pattern) if p.is_file())


# A change of these reruns what depends on them, by content and not by time: a fresh clone has all its files new.
# Recorded campaigns depend on neither.
KERNEL_DIGEST = select.kernels_digest(REPO)
LAB_DIGEST = files.digest(
    REPO,
    [
        "workflow/lab/**/*.py",
        "workflow/lab/templates/*",
        "workflow/schemas/*",
        "kernels/qgemm_mx/*.py",
    ],
)


def campaign_files(plan):
    """Files of the campaign that a plan replays."""
    return repository_files(f"{select.CAMPAIGNS}/{plan.campaign}/*") if plan.campaign else []


REPLAYED_FILES = [file for plan in PLANS.values() for file in campaign_files(plan)]
PREREG_FILES = repository_files("prereg/**/*")


def without_a_flag(wildcards):
    """Input function of the first rules: no input, but a run that was stopped goes on with the same command.

    What a stopped job had begun is made again, as --rerun-incomplete does. Snakemake holds that in the settings of the
    DAG, which do not exist before its rules are resolved; so it is set where the first of them are.
    """
    workflow.dag_settings.force_incomplete = True
    return []


def measured_rung(rung):
    """Input function of a rung's target: nothing, or, where no part of it has a campaign, an error that says why."""

    def check(wildcards):
        parts = [plan for part, plan in PLANS.items() if rungs.rung_of(part) == rung]
        if all(plan.action == "nothing" for plan in parts):
            with one_sentence(rungs.NotMeasured):
                rungs.require(rung, REPO)
        return []

    return check


def campaign_to_pack(wildcards):
    """Input function: the files of the campaign that was asked for, or else of the newest."""
    with one_sentence(select.SelectError):
        return repository_files(f"{select.CAMPAIGNS}/{select.campaign_to_pack(config, REPO)}/*")


def archive_to_import(wildcards):
    """Input function: the archive that was named."""
    with one_sentence(select.SelectError):
        return select.archive_to_import(config)
