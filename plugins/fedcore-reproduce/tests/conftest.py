from tests.forked_jobs import forked_jobs as forked_jobs
