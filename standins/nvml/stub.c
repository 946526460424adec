/* A libnvidia-ml.so.1 that reports what a file defines. NVML_STUB names the file, which is read at each call.
 *
 * A line defines a GPU or, if its UUID begins with MIG-, a MIG device of the GPU above it, which is then split:
 *     uuid;name;MiB;pid[:MiB] pid …;status[;key=steps]…
 * A line without ";" is key=steps for all: `driver`, NVML's status for every call, `now` and `loop`, see below.
 *
 * Steps define a value over time: `40`, or `0:95,30:!15,60:-`, each from a second of the file's life on. A step is a
 * number; `-`, not reported (3, not supported); or `!N`, NVML's error N. The file's life begins when it is written;
 * `now=25` holds it at second 25, and `loop=60` restarts it every 60 seconds.
 *
 * `status` is NVML's status of that GPU (0 OK, 15 lost); 1000 hangs, 1001 kills the process. Keys of a GPU: util, mem
 * (MiB used), power, limit (W), temp, throttle (bits); `mig=1` splits it without any device, with `gpm=1` its MIG
 * devices report their utilization. Missing keys are not reported. Without NVML_STUB the library reports that it is
 * missing. Compiled with -DOLD it lacks functions of later versions.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_LIBRARY = 12, HANGS = 1000, CRASHES = 1001, LINES = 64, KEYS = 10 };

typedef int status_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory2_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long at_us; unsigned int value, unused; } sample_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;
typedef struct { unsigned int version, supported; } support_t;
typedef struct { unsigned int id; status_t status; double value; const char *info[3]; } metric_t;
typedef struct { unsigned int version, n; void *one, *two; metric_t metrics[1]; } metrics_t;
typedef struct {
    char text[1024], *uuid, *name, *pids, *status, *keys[KEYS];
    unsigned long long mib;
    int is_part, parts, parent;
} gpu_t;

static __thread gpu_t all[LINES];
static __thread char common[KEYS][128];
static __thread int n_all, n_common;
static __thread double now;

/* The value of `key=` among these, or NULL. */
static const char *key(char *const *among, int n, const char *name) {
    size_t size = strlen(name);
    for (int i = 0; i < n; i++)
        if (among[i] && !strncmp(among[i], name, size) && among[i][size] == '=') return among[i] + size + 1;
    return NULL;
}

/* The current step: OK and its number, or its error. */
static status_t step(const char *steps, long *value) {
    char copy[1024], *rest = copy, *one, *found = NULL;
    if (!steps) return NOT_SUPPORTED;
    snprintf(copy, sizeof copy, "%s", steps);
    while ((one = strsep(&rest, ","))) {
        char *colon = strchr(one, ':');
        if (!colon || atof(one) <= now) found = colon ? colon + 1 : one;
    }
    if (!found || *found == '-') return NOT_SUPPORTED;
    if (*found == '!') return atoi(found + 1);
    *value = atol(found);
    return OK;
}

static const char *of_all(const char *name) {
    char *lines[KEYS];
    for (int i = 0; i < n_common; i++) lines[i] = common[i];
    return key(lines, n_common, name);
}

/* Read the file; returns the driver's status. */
static status_t load(void) {
    const char *path = getenv("NVML_STUB"), *steps;
    char line[1024];
    struct stat about;
    struct timespec clock;
    n_all = n_common = 0;
    if (getenv("NVML_STUB_BROKEN")) return atoi(getenv("NVML_STUB_BROKEN"));
    if (!path) return NO_LIBRARY;
    FILE *file = fopen(path, "r");
    if (!file) return 999;
    while (n_all < LINES && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strchr(line, ';')) {
            if (*line && n_common < KEYS) snprintf(common[n_common++], sizeof common[0], "%.127s", line);
            continue;
        }
        gpu_t *gpu = all + n_all;
        memset(gpu, 0, sizeof *gpu);
        strcpy(gpu->text, line);
        char *rest = gpu->text;
        gpu->uuid = strsep(&rest, ";");
        gpu->name = strsep(&rest, ";");
        gpu->mib = strtoull(strsep(&rest, ";"), NULL, 10);
        gpu->pids = strsep(&rest, ";");
        gpu->status = strsep(&rest, ";");
        for (int i = 0; i < KEYS && rest; i++) gpu->keys[i] = strsep(&rest, ";");
        gpu->is_part = !strncmp(gpu->uuid, "MIG-", 4);
        gpu->parent = n_all;
        if (gpu->is_part && n_all) {
            gpu->parent = all[n_all - 1].parent;
            gpu->parts = ++all[gpu->parent].parts;
        }
        n_all++;
    }
    fstat(fileno(file), &about);
    fclose(file);
    clock_gettime(CLOCK_REALTIME, &clock);
    now = clock.tv_sec - about.st_mtim.tv_sec + (clock.tv_nsec - about.st_mtim.tv_nsec) / 1e9;
    if ((steps = of_all("now"))) now = atof(steps);
    if ((steps = of_all("loop"))) now -= atof(steps) * (long)(now / atof(steps));
    long status = OK;
    if ((steps = of_all("driver"))) step(steps, &status);
    if (status == HANGS) for (;;) pause();
    if (status == CRASHES) raise(SIGKILL);
    return status;
}

/* The line of a handle, and its status. */
static status_t at(void *device, gpu_t **gpu) {
    long status = load();
    size_t place = (size_t)device - 1;
    if (status) return status;
    if (place >= (size_t)n_all) return INVALID;
    *gpu = all + place;
    if (!all[(*gpu)->parent].status || step(all[(*gpu)->parent].status, &status)) status = 999;
    if (!status && (*gpu)->is_part && step((*gpu)->status, &status)) status = 999;
    return status;
}

static status_t value_of(void *device, const char *name, long *value) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    return status ? status : step(key(gpu->keys, KEYS, name), value);
}

static status_t scaled(void *device, const char *name, unsigned int times, unsigned int *into) {
    long value;
    status_t status = value_of(device, name, &value);
    if (!status) *into = value * times;
    return status;
}

static status_t split(const gpu_t *gpu, long *mode) {
    const char *steps = key(gpu->keys, KEYS, "mig");
    *mode = gpu->parts > 0;
    return steps ? step(steps, mode) : OK;
}

status_t nvmlInitWithFlags(unsigned int flags) { return load(); }
status_t nvmlInit_v2(void) { return load(); }
status_t nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(status_t status) {
    return status == 9 ? "Driver Not Loaded" : status == 15 ? "GPU is lost"
         : status == 18 ? "Driver/library version mismatch" : "Unknown Error";
}

status_t nvmlDeviceGetCount_v2(unsigned int *count) {
    status_t status = load();
    *count = 0;
    for (int i = 0; i < n_all; i++) *count += !all[i].is_part;
    return status;
}

status_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    status_t status = load();
    gpu_t *gpu;
    if (status) return status;
    for (int i = 0; i < n_all; i++)
        if (!all[i].is_part && index-- == 0) return at(*device = (void *)(size_t)(i + 1), &gpu);
    return INVALID;
}

status_t nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    status_t status = load();
    gpu_t *gpu;
    if (status) return status;
    for (int i = 0; i < n_all; i++)
        if (!strcmp(all[i].uuid, uuid)) return at(*device = (void *)(size_t)(i + 1), &gpu);
    return NOT_FOUND;
}

status_t nvmlDeviceGetIndex(void *device, unsigned int *index) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    if (status) return status;
    *index = 0;
    for (int i = 0; i < (gpu->is_part ? gpu->parent : (int)(gpu - all)); i++) *index += !all[i].is_part;
    return OK;
}

static status_t text(void *device, int is_name, char *into, unsigned int size) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    if (!status) snprintf(into, size, "%s", is_name ? gpu->name : gpu->uuid);
    return status;
}

status_t nvmlDeviceGetUUID(void *device, char *into, unsigned int size) { return text(device, 0, into, size); }
status_t nvmlDeviceGetName(void *device, char *into, unsigned int size) { return text(device, 1, into, size); }

static status_t memory(void *device, unsigned long long *total, unsigned long long *used) {
    gpu_t *gpu;
    long mib = 0;
    status_t status = at(device, &gpu);
    if (status) return status;
    if (key(gpu->keys, KEYS, "mem")) status = step(key(gpu->keys, KEYS, "mem"), &mib);
    *total = gpu->mib << 20;
    *used = (unsigned long long)mib << 20;
    return status;
}

status_t nvmlDeviceGetMemoryInfo(void *device, memory_t *into) {
    status_t status = memory(device, &into->total, &into->used);
    into->free = into->total - into->used;
    return status;
}

/* NVML doesn't report it for MIG devices. */
status_t nvmlDeviceGetUtilizationRates(void *device, utilization_t *into) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    long is_split = 0;
    if (status || (status = split(gpu, &is_split))) return status;
    if (gpu->is_part || is_split) return NOT_SUPPORTED;
    into->memory = 0;
    return scaled(device, "util", 1, &into->gpu);
}

#ifndef OLD
/* The last 71 moments of 0.2 s, the oldest first; of those without a value there is none. */
status_t nvmlDeviceGetSamples(void *device, int type, unsigned long long since, int *kind, unsigned int *count, sample_t *into) {
    utilization_t moment;
    status_t status = nvmlDeviceGetUtilizationRates(device, &moment);
    gpu_t *gpu = all + (size_t)device - 1;
    unsigned int n = 0;
    double end;
    if (status) return status;
    if (type != 1) return INVALID;
    end = now;
    for (int back = 70; back >= 0; back--) {
        long value;
        now = end - back * 0.2;
        if (now < 0 || step(key(gpu->keys, KEYS, "util"), &value)) continue;
        if (into && n < *count) into[n] = (sample_t){.at_us = (1000 + now) * 1e6, .value = value};
        n++;
    }
    now = end;
    *kind = 1;
    *count = n;
    return OK;
}
#endif

status_t nvmlDeviceGetPowerUsage(void *device, unsigned int *mw) { return scaled(device, "power", 1000, mw); }
status_t nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *mw) { return scaled(device, "limit", 1000, mw); }
status_t nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *c) { return scaled(device, "temp", 1, c); }

#ifndef OLD
status_t nvmlDeviceGetMemoryInfo_v2(void *device, memory2_t *into) {
    status_t status = memory(device, &into->total, &into->used);
    into->reserved = 0;
    into->free = into->total - into->used;
    return status;
}

status_t nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
    long value;
    status_t status = value_of(device, "throttle", &value);
    if (!status) *bits = value;
    return status;
}

status_t nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *into) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    if (status) return status;
    unsigned int room = *count, n = 0;
    char copy[1024], *rest = copy, *word;
    snprintf(copy, sizeof copy, "%s", gpu->pids);
    while ((word = strsep(&rest, " "))) {
        if (!*word) continue;
        char *colon = strchr(word, ':');
        unsigned long long used = colon ? strtoull(colon + 1, NULL, 10) << 20 : ~0ull;
        if (n < room) into[n] = (process_t){.pid = atoi(word), .used = used};
        n++;
    }
    *count = n;
    return n > room ? TOO_SMALL : OK;
}

status_t nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    gpu_t *gpu;
    long mode;
    status_t status = at(device, &gpu);
    if (!status && !(status = split(gpu, &mode))) *current = *pending = mode;
    return status;
}

status_t nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned int *count) { *count = 7; return OK; }

status_t nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned int index, void **part) {
    status_t status = load();
    if (status) return status;
    for (int i = 0; i < n_all; i++)
        if (all[i].is_part && all[i].parent == (int)(size_t)device - 1 && index-- == 0) {
            *part = (void *)(size_t)(i + 1);
            return OK;
        }
    return NOT_FOUND;
}

status_t nvmlDeviceGetGpuInstanceId(void *device, unsigned int *id) {
    gpu_t *gpu;
    status_t status = at(device, &gpu);
    if (!status) *id = gpu->parts;
    return status;
}

status_t nvmlGpmQueryDeviceSupport(void *device, support_t *into) {
    long value = 0;
    status_t status = value_of(device, "gpm", &value);
    into->supported = !status && value;
    return status == NOT_SUPPORTED ? OK : status;
}

status_t nvmlGpmSampleAlloc(void **sample) { return (*sample = calloc(1, sizeof(size_t))) ? OK : 20; }
status_t nvmlGpmSampleFree(void *sample) { free(sample); return OK; }

/* A sample is the handle of its MIG device. */
status_t nvmlGpmMigSampleGet(void *device, unsigned int instance, void *sample) {
    void *part;
    status_t status = nvmlDeviceGetMigDeviceHandleByIndex(device, instance - 1, &part);
    if (!status) *(size_t *)sample = (size_t)part;
    return status;
}

status_t nvmlGpmMetricsGet(metrics_t *wanted) {
    long value = 0;
    if (*(size_t *)wanted->one != *(size_t *)wanted->two || wanted->metrics[0].id != 1) return INVALID;
    wanted->metrics[0].status = value_of((void *)*(size_t *)wanted->two, "util", &value);
    wanted->metrics[0].value = value;
    return OK;
}
#endif
