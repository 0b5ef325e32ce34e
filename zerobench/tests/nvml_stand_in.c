/* A stand-in for libnvidia-ml.so.1: the functions that zerobench uses, and scenes for them to play. No GPU is read.
 *
 * The scene is set by zb_scene() or, at the first call, by the environment variable ZB_NVML_SCENE. Numbers are made up,
 * and plain on purpose: GPU i holds (i + 1) GiB for processes and 512 MiB for the driver.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
#define GIB (1ull << 30)
#define MIB (1ull << 20)
#define NOT_AVAILABLE (~0ull)

typedef struct { int index, mig; } *device_t;
typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory2_t;
typedef struct { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct {
    unsigned field, scope;
    int64_t timestamp, latency;
    int type, ret;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; } value;
} field_t;

static struct { int index, mig; } gpus[3] = {{0, 0}, {1, 0}, {0, 1}};
static char scene[32];
static unsigned pid;
static int lost, opened, tick;

/* what: two, hidden, strangers, lost, na, wrap, reset, mig, old, idle, pcie32. as: the pid that the process list shows. */
void zb_scene(const char *what, unsigned as) {
    snprintf(scene, sizeof scene, "%s", what);
    pid = as;
    lost = tick = 0;
    opened = strcmp(what, "idle") != 0;
}
/* The process opens its context, the driver goes away, the counters move on. */
void zb_open(void) { opened = 1; }
void zb_lose(void) { lost = 1; }
void zb_tick(void) { tick++; }

static int is(const char *what) { return strcmp(scene, what) == 0; }

int nvmlInitWithFlags(unsigned flags) {
    const char *given = getenv("ZB_NVML_SCENE");
    (void)flags;
    if (!scene[0]) zb_scene(given ? given : "two", 4242);
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int ret) {
    switch (ret) {
        case SUCCESS: return "Success";
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case GPU_IS_LOST: return "GPU is lost";
        default: return "Stand-in error";
    }
}
int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "580.00.stand-in");
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    *device = (device_t)&gpus[index];
    return index < 2 ? SUCCESS : NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    if (strcmp(uuid, "GPU-aaaa") == 0) *device = (device_t)&gpus[0];
    else if (strcmp(uuid, "GPU-bbbb") == 0) *device = (device_t)&gpus[1];
    else if (strcmp(uuid, "MIG-cccc") == 0 && is("mig")) *device = (device_t)&gpus[2];
    else return NOT_FOUND;
    return SUCCESS;
}
int nvmlDeviceGetName(device_t device, char *out, unsigned length) {
    snprintf(out, length, "NVML stand-in %d", device->index);
    return SUCCESS;
}
int nvmlDeviceGetUUID(device_t device, char *out, unsigned length) {
    snprintf(out, length, device->mig ? "MIG-cccc" : device->index ? "GPU-bbbb" : "GPU-aaaa");
    return SUCCESS;
}
int nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
    if (!is("mig")) return NOT_SUPPORTED;
    *current = *pending = !device->mig && device->index == 0;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *count) {
    (void)device;
    *count = 2;
    return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *mig) {
    if (device->index || index != 1) return NOT_FOUND;
    *mig = (device_t)&gpus[2];
    return SUCCESS;
}
static uint64_t in_use(device_t device) {
    if (device->mig) return 256 * MIB;
    return opened ? (device->index + 1) * GIB : 0;
}
int nvmlDeviceGetMemoryInfo(device_t device, memory_t *memory) {
    if (lost) return GPU_IS_LOST;
    memory->total = 16 * GIB;
    memory->used = in_use(device) + 512 * MIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(device_t device, memory2_t *memory) {
    if (lost) return GPU_IS_LOST;
    memory->total = 16 * GIB;
    memory->reserved = device->mig ? 0 : 512 * MIB;
    memory->used = in_use(device) + memory->reserved;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
#endif
static int processes(device_t device, unsigned *count, process_t *out) {
    process_t all[2] = {{pid, device->mig ? 128 * MIB : 700 * MIB, 0, 0}, {77, 100 * MIB, 0, 0}};
    unsigned n = is("strangers") ? 2 : is("hidden") || !opened ? 0 : 1;
    if (lost) return GPU_IS_LOST;
    if (is("na")) all[0].used = NOT_AVAILABLE;
    if (is("strangers") || is("idle")) all[0].pid = 78; /* the host's number for us */
    if (!out || *count < n) {
        *count = n;
        return n ? INSUFFICIENT_SIZE : SUCCESS;
    }
    *count = n;
    memcpy(out, all, n * sizeof *out);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_t *out) {
    return processes(device, count, out);
}
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *out) {
    return processes(device, count, out);
}
#endif
int nvmlDeviceGetComputeMode(device_t device, int *mode) {
    (void)device;
    *mode = 0;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *active) {
    (void)device;
    if (link > 3) return NOT_SUPPORTED;
    *active = link != 3; /* three of four links are up */
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(device_t device, int type, unsigned *clock) {
    (void)device;
    (void)type;
    if (is("na")) return NOT_SUPPORTED;
    *clock = 1980;
    return SUCCESS;
}
/* A tick moves each NVLink counter by 1000 KiB (2000 received) and each PCIe counter by 5000 B (7000). */
static void fill(field_t *f) {
    uint64_t start = 100;
    f->ret = SUCCESS;
    f->type = 3;
    if (f->field == 91) {
        f->type = 1;
        f->value.ui = 4;
        return;
    }
    if (lost) f->ret = GPU_IS_LOST;
    else if (is("na")) f->ret = NOT_SUPPORTED;
    else if (is("wrap") && (f->field == 138 || f->field == 139)) {
        f->type = 1;
        f->value.ui = 0xffffffffu - 10 + (unsigned)tick * (f->field == 138 ? 1000 : 2000);
    } else if (is("pcie32") && f->field >= 197) {
        f->type = 1;
        f->value.ui = (unsigned)tick * 5000;
    } else {
        if (is("reset")) start = tick ? 0 : 1000000;
        if (f->field == 138 || f->field == 139) f->value.ull = start + tick * (f->field == 138 ? 1000 : 2000);
        else if (f->field == 197 || f->field == 198) f->value.ull = start + tick * (f->field == 197 ? 5000 : 7000);
        else f->ret = NOT_SUPPORTED;
    }
}
int nvmlDeviceGetFieldValues(device_t device, int count, field_t *fields) {
    (void)device;
    for (int i = 0; i < count; i++) fill(&fields[i]);
    return SUCCESS;
}
