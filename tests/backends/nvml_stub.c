/* A libnvidia-ml.so.1 that says what a file says. NVML_STUB names it; one GPU per line:
 *     uuid;name;MiB;pid pid …;status
 * where status is NVML's answer for that GPU (0 in order, 15 fallen off the bus). Read anew at each call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int status_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } process_t;
typedef struct { char uuid[96], name[96], pids[256]; unsigned long long mib; int status; } gpu_t;

static int gpus(gpu_t *into) {
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    char line[1024];
    int n = 0;
    while (file && n < 16 && fgets(line, sizeof line, file)) {
        gpu_t *gpu = into + n++;
        memset(gpu, 0, sizeof *gpu);
        char *rest = line, *field[5];
        for (int i = 0; i < 5; i++) field[i] = strsep(&rest, ";");
        strcpy(gpu->uuid, field[0]);
        strcpy(gpu->name, field[1]);
        gpu->mib = strtoull(field[2], NULL, 10);
        strcpy(gpu->pids, field[3]);
        gpu->status = atoi(field[4]);
    }
    if (file) fclose(file);
    return n;
}

static gpu_t at(void *device) {
    static gpu_t all[16];
    gpus(all);
    return all[(size_t)device - 1];
}

status_t nvmlInitWithFlags(unsigned int flags) { return getenv("NVML_STUB_BROKEN") ? atoi(getenv("NVML_STUB_BROKEN")) : 0; }
status_t nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(status_t status) { return status == 15 ? "GPU is lost" : "Unknown Error"; }
status_t nvmlDeviceGetCount_v2(unsigned int *count) { gpu_t all[16]; *count = gpus(all); return 0; }
status_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return at(*device).status;
}
status_t nvmlDeviceGetUUID(void *device, char *text, unsigned int size) { strncpy(text, at(device).uuid, size); return 0; }
status_t nvmlDeviceGetName(void *device, char *text, unsigned int size) { strncpy(text, at(device).name, size); return 0; }
status_t nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = memory->free = at(device).mib << 20;
    memory->used = 0;
    return 0;
}
status_t nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, process_t *into) {
    gpu_t gpu = at(device);
    unsigned int room = *count, n = 0;
    for (char *word = strtok(gpu.pids, " "); word; word = strtok(NULL, " "), n++)
        if (n < room) into[n] = (process_t){.pid = atoi(word)};
    *count = n;
    return n > room ? 7 : 0;
}
