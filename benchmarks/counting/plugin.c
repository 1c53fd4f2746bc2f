/* A plugin for qemu's user-mode emulation: instructions run, and bytes loaded and stored, by file and place in it.

   qemu-aarch64 -plugin ./plugin.so,out=PREFIX PROGRAM…

   A program that calls getpriority() ends an interval: PREFIX0, PREFIX1 … are what ran before the first call, between it
   and the second … A line for each block of code that ran: instructions, bytes loaded, bytes stored, offset in its file
   (hexadecimal), file; "-" for code in no file. The interface is qemu's of version 1 (qemu 7 and 8). */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t Id;
typedef struct qemu_plugin_tb Block;
typedef struct qemu_plugin_insn Instruction;

enum { ADD_U64 = 0, NO_REGISTERS = 0, READ_AND_WRITE = 3, GETPRIORITY = 141 };

void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, Block *));
void qemu_plugin_register_vcpu_tb_exec_inline(Block *, int operation, void *counter, uint64_t added);
void qemu_plugin_register_vcpu_mem_cb(Instruction *, void (*)(unsigned, uint32_t, uint64_t, void *), int registers,
                                      int accesses, void *given);
void qemu_plugin_register_vcpu_syscall_cb(Id, void (*)(Id, unsigned, int64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                                       uint64_t, uint64_t, uint64_t, uint64_t));
size_t qemu_plugin_tb_n_insns(const Block *);
Instruction *qemu_plugin_tb_get_insn(const Block *, size_t);
void *qemu_plugin_insn_haddr(const Instruction *);
unsigned qemu_plugin_mem_size_shift(uint32_t access);
bool qemu_plugin_mem_is_store(uint32_t access);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

typedef struct Counts {
    uint64_t instructions, loaded, stored;
    uintptr_t at; /* in this process, which is the emulated program's too */
    struct Counts *next;
} Counts;

static Counts *all;
static char prefix[4096];

static void accessed(unsigned cpu, uint32_t access, uint64_t address, void *given) {
    (void)cpu, (void)address;
    Counts *counts = given;
    *(qemu_plugin_mem_is_store(access) ? &counts->stored : &counts->loaded) += 1u << qemu_plugin_mem_size_shift(access);
}

/* qemu translates under a lock, one block at a time. */
static void translated(Id id, Block *block) {
    (void)id;
    size_t size = qemu_plugin_tb_n_insns(block);
    Counts *counts = calloc(1, sizeof *counts);
    if (counts == NULL)
        abort();
    counts->at = (uintptr_t)qemu_plugin_insn_haddr(qemu_plugin_tb_get_insn(block, 0));
    counts->next = all;
    all = counts;
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &counts->instructions, size);
    for (size_t i = 0; i < size; i++)
        qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(block, i), accessed, NO_REGISTERS, READ_AND_WRITE,
                                         counts);
}

static void tell(FILE *to, uintptr_t begin, uintptr_t end, uint64_t offset, const char *file) {
    for (Counts *c = all; c != NULL; c = c->next)
        if (c->instructions && c->at >= begin && c->at < end) {
            fprintf(to, "%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIx64 " %s\n", c->instructions, c->loaded, c->stored,
                    offset + (c->at - begin), file);
            c->instructions = c->loaded = c->stored = 0;
        }
}

static void called(Id id, unsigned cpu, int64_t number, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e,
                   uint64_t f, uint64_t g, uint64_t h) {
    (void)id, (void)cpu, (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, (void)g, (void)h;
    static int interval;
    if (number != GETPRIORITY)
        return;
    char out[sizeof prefix + 16], line[8192], file[4096];
    snprintf(out, sizeof out, "%s%d", prefix, interval++);
    FILE *maps = fopen("/proc/self/maps", "r"), *to = fopen(out, "w");
    if (maps == NULL || to == NULL)
        abort();
    while (fgets(line, sizeof line, maps) != NULL) {
        uintptr_t begin, end;
        uint64_t offset;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %" SCNx64 " %*s %*s %4095[^\n]", &begin, &end, &offset, file) == 4)
            tell(to, begin, end, offset, file);
    }
    tell(to, 0, UINTPTR_MAX, 0, "-");
    if (fclose(to) != 0)
        abort();
    fclose(maps);
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void *info, int count, char **given) {
    (void)info;
    if (count != 1 || strncmp(given[0], "out=", 4) != 0 || strlen(given[0]) >= sizeof prefix)
        return 1;
    strcpy(prefix, given[0] + 4);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_vcpu_syscall_cb(id, called);
    return 0;
}
