/* The thread pool that runs an operator's jobs in parallel. */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "ort_abi.h"

/* Run job(data, 0 … count − 1), in any order, on the team that SetThreads built. Without a team, or while it works for
another session, uses the session's threads. */
Status *parallel(Api api, const Context *context, size_t count, void (*job)(void *, size_t), void *data);

/* The team's threads, including the caller's. 0 without a team: the size of the session's pool is unknown. */
int64_t team_size(void);

#endif
