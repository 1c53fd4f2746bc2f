/* The threads that jobs are shared out to. */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "ort_abi.h"

/* Run job(data, 0 … count − 1), in any order, on the team that SetThreads made; on the session's threads where there is
none, or where it works for another session. */
Status *parallel(Api api, const Context *context, size_t count, void (*job)(void *, size_t), void *data);

/* How many threads the team has, the caller's among them; 0 where there is none, and the session's are not known. */
int64_t team_size(void);

#endif
