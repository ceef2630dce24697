/* Stands in for CUDA's runtime under PyTorch: device memory is the host's, copies are made at once, kernels do nothing.

   What a card would refuse is refused: memory that runs out, ranges that end beyond their allocation or cross from one
   registration into another, registering twice, and unregistering what is not registered. Types are CUDA 13's, as far as
   they are used. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef struct { unsigned x, y, z; } Dim3;
typedef struct { double seconds; } Event;
enum { DONE = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };
enum Kind { HOST = 1, DEVICE = 2, FREE = 0 }; /* as cudaMemoryType has them */
typedef struct { char *begin; size_t bytes; int kind; } Range;

#define MOST_RANGES 65536
static Range ranges[MOST_RANGES];
static int used_ranges;
static size_t device_bytes, device_limit = (size_t)1 << 30;
static long counts[4]; /* registered, unregistered, copied, launched */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int last_error;

static int failed(int status) {
    if (status != DONE) last_error = status;
    return status;
}

static Range *find(const void *address) {
    for (int index = 0; index < used_ranges; ++index) {
        Range *range = &ranges[index];
        if (range->kind != FREE && (char *)address >= range->begin && (char *)address < range->begin + range->bytes)
            return range;
    }
    return NULL;
}

static int add(void *begin, size_t bytes, int kind) {
    int index = 0;
    while (index < used_ranges && ranges[index].kind != FREE) ++index;
    if (index == MOST_RANGES) return OUT_OF_MEMORY;
    if (index == used_ranges) ++used_ranges;
    ranges[index] = (Range){begin, bytes, kind};
    return DONE;
}

static int is_within(const void *address, size_t bytes) {
    Range *range = find(address);
    return range == NULL || (char *)address + bytes <= range->begin + range->bytes;
}

/* For tests. */
long standin_count(int which) { return counts[which]; }
void standin_limit(size_t bytes) { device_limit = bytes; }

/* Memory. */
static int take(void **made, size_t bytes, int kind) {
    int status = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (kind == HOST || device_bytes + bytes <= device_limit) {
        char *memory = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED && (status = add(memory, bytes, kind)) == DONE) {
            *made = memory;
            if (kind == DEVICE) device_bytes += bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return failed(status);
}

static int give_back(void *memory, int kind) {
    int status = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *range = find(memory);
    if (memory == NULL) {
        status = DONE;
    } else if (range != NULL && range->kind == kind && range->begin == memory) {
        if (kind == DEVICE) device_bytes -= range->bytes;
        munmap(range->begin, range->bytes + 1);
        range->kind = FREE;
        status = DONE;
    }
    pthread_mutex_unlock(&lock);
    return failed(status);
}

int cudaMalloc(void **made, size_t bytes) { return take(made, bytes, DEVICE); }
int cudaMallocAsync(void **made, size_t bytes, void *stream) { return take(made, bytes, DEVICE); }
int cudaHostAlloc(void **made, size_t bytes, unsigned flags) { return take(made, bytes, HOST); }
int cudaFree(void *memory) { return give_back(memory, DEVICE); }
int cudaFreeAsync(void *memory, void *stream) { return give_back(memory, DEVICE); }
int cudaFreeHost(void *memory) { return give_back(memory, HOST); }

int cudaHostRegister(void *begin, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    int status = find(begin) || find((char *)begin + bytes - 1) ? ALREADY_REGISTERED : add(begin, bytes, HOST);
    counts[0] += status == DONE;
    pthread_mutex_unlock(&lock);
    return failed(status);
}

int cudaHostUnregister(void *begin) {
    pthread_mutex_lock(&lock);
    Range *range = find(begin);
    int status = range != NULL && range->kind == HOST && range->begin == begin ? DONE : NOT_REGISTERED;
    if (status == DONE) range->kind = FREE;
    counts[1] += status == DONE;
    pthread_mutex_unlock(&lock);
    return failed(status);
}

int cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
    *all_bytes = device_limit;
    *free_bytes = device_limit > device_bytes ? device_limit - device_bytes : 0;
    return DONE;
}

int cudaPointerGetAttributes(void *found, const void *address) {
    struct { int type, device; const void *device_pointer, *host_pointer; } *answer = found;
    pthread_mutex_lock(&lock);
    Range *range = find(address);
    answer->type = range == NULL ? 0 : range->kind;
    answer->device = range == NULL ? -2 : 0;
    answer->device_pointer = range == NULL ? NULL : address;
    answer->host_pointer = range == NULL || range->kind == HOST ? address : NULL;
    pthread_mutex_unlock(&lock);
    return DONE;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    pthread_mutex_lock(&lock);
    int status = is_within(to, bytes) && is_within(from, bytes) ? DONE : INVALID_VALUE;
    counts[2] += status == DONE;
    pthread_mutex_unlock(&lock);
    if (status == DONE) memmove(to, from, bytes);
    return failed(status);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    if (!is_within(to, bytes)) return failed(INVALID_VALUE);
    memset(to, value, bytes);
    return DONE;
}
int cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

/* The device. */
int cudaGetDeviceCount(int *count) { return *count = 1, DONE; }
int cudaGetDevice(int *device) { return *device = 0, DONE; }
int cudaSetDevice(int device) { return failed(device == 0 ? DONE : 101); }
int cudaDriverGetVersion(int *version) { return *version = 13000, DONE; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, DONE; }
int cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = 0, DONE; }
int cudaDeviceGetPCIBusId(char *text, int length, int device) { return strncpy(text, "0000:01:00.0", length), DONE; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -1, DONE; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : attribute == 97 ? 232448 : attribute == 75 ? 9 : attribute == 10 ? 32 : 0;
    return DONE;
}

int cudaGetDeviceProperties(void *found, int device) {
    struct Facts {
        char name[256], uuid[16], luid[8];
        unsigned luid_mask;
        size_t memory, shared;
        int registers, warp;
        size_t pitch;
        int threads, block[3], grid[3];
        size_t constant;
        int major, minor;
        size_t texture, texture_pitch;
        int multiprocessors;
    } *facts = found;
    strcpy(facts->name, "no card");
    facts->memory = device_limit;
    facts->shared = 49152;
    facts->registers = 65536;
    facts->warp = 32;
    facts->threads = 1024;
    for (int axis = 0; axis < 3; ++axis) facts->block[axis] = 1024, facts->grid[axis] = 65535;
    facts->major = 9;
    facts->texture = 512;
    facts->multiprocessors = 132;
    return DONE;
}

/* Streams and events; everything is done when its call returns. */
static int make(void **made) {
    Event *event = calloc(1, sizeof(Event));
    *made = event;
    return failed(event == NULL ? OUT_OF_MEMORY : DONE);
}
int cudaStreamCreate(void **made) { return make(made); }
int cudaStreamCreateWithPriority(void **made, unsigned flags, int priority) { return make(made); }
int cudaStreamDestroy(void *stream) { return free(stream), DONE; }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, DONE; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0, DONE; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { return *status = 0, DONE; } /* and more, if not NULL */
int cudaEventCreate(void **made) { return make(made); }
int cudaEventCreateWithFlags(void **made, unsigned flags) { return make(made); }
int cudaEventDestroy(void *event) { return free(event), DONE; }
int cudaEventRecord(Event *event, void *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
    return DONE;
}
int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventElapsedTime(float *milliseconds, Event *first, Event *second) {
    *milliseconds = (float)((second->seconds - first->seconds) * 1e3);
    return DONE;
}

/* Kernels. */
static int launched(void) {
    __atomic_add_fetch(&counts[3], 1, __ATOMIC_RELAXED);
    return DONE;
}
int cudaLaunchKernel(const void *kernel, Dim3 grid, Dim3 block, void **told, size_t shared, void *stream) { return launched(); }
int __cudaLaunchKernel(void *kernel, Dim3 grid, Dim3 block, void **told, size_t shared, void *stream) { return launched(); }
int cudaLaunchKernelExC(const void *how, const void *kernel, void **told) { return launched(); }
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **stream) {
    return *grid = *block = (Dim3){1, 1, 1}, *shared = 0, *stream = NULL, DONE;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
int __cudaGetKernel(const void **made, const void *kernel) { return *made = kernel, DONE; }
int cudaFuncGetAttributes(void *found, const void *kernel) {
    struct { size_t shared, constant, local; int threads, registers, ptx, binary; } *facts = found;
    facts->shared = facts->constant = facts->local = 0;
    facts->threads = 1024, facts->registers = 32, facts->ptx = facts->binary = 90;
    return DONE;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    return *blocks = 2, DONE;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *kernel, int threads, size_t shared, unsigned flags) {
    return *blocks = 2, DONE;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, DONE; }
int cuCtxGetCurrent(void **context) { return *context = counts, DONE; }
static int nothing(void) { return DONE; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, long flags, int *status) {
    *found = (void *)nothing;
    if (status != NULL) *status = 0;
    return DONE;
}

/* Errors. */
int cudaGetLastError(void) {
    int status = last_error;
    last_error = DONE;
    return status;
}
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(int status) { return status == OUT_OF_MEMORY ? "out of memory" : "refused"; }
const char *cudaGetErrorName(int status) { return status == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaError"; }
