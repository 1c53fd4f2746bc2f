/* The threads that jobs are shared out to. */
#ifndef LLMC_TEAM_H
#define LLMC_TEAM_H

#include "ort_abi.h"

/* Run job(data, 0 … count − 1), in any order, on the team that SetThreads made; on the session's threads where there is
none, or where it works for another session. */
Status *parallel(Api api, const Context *context, size_t count, void (*job)(void *, size_t), void *data);

#endif
