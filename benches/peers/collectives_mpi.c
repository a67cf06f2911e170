/* Times collectives of MPI as `lockstep bench collectives --json` times ours: the median of all repetitions, on the
 * slowest rank; rank 0 prints one JSON document.
 *
 *     mpicc -O2 -o collectives_mpi collectives_mpi.c
 *     mpirun -n 2 ./collectives_mpi all_reduce 0.5 4096 16777216
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM_UP = 3, MOST = 20000 };

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int count) {
    qsort(times, count, sizeof *times, compare);
    return times[count / 2];
}

static void call(const char *op, float *first, float *second, int block, int rank, int ranks) {
    if (!strcmp(op, "all_reduce")) {
        MPI_Allreduce(MPI_IN_PLACE, first, block * ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (!strcmp(op, "reduce_scatter")) {
        MPI_Reduce_scatter_block(first, second, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (!strcmp(op, "all_gather")) {
        MPI_Allgather(first + (size_t)rank * block, block, MPI_FLOAT, second, block, MPI_FLOAT, MPI_COMM_WORLD);
    } else if (!strcmp(op, "all_to_all")) {
        MPI_Alltoall(first, block, MPI_FLOAT, second, block, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        fprintf(stderr, "no operation %s\n", op);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 4) {
        fprintf(stderr, "usage: %s OP SECONDS BYTES...\n", argv[0]);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const char *op = argv[1];
    double seconds = atof(argv[2]);
    static double times[WARM_UP + MOST];
    for (int size = 3; size < argc; size++) {
        int block = (int)(atol(argv[size]) / 4 / ranks);
        size_t elements = (size_t)block * ranks;
        float *first = malloc(elements * 4), *second = malloc(elements * 4);
        /* Sums of zeros neither overflow nor become denormal, however often they are summed. */
        memset(first, 0, elements * 4);
        memset(second, 0, elements * 4);
        int repetitions = WARM_UP;
        for (int i = 0; i < repetitions; i++) {
            double begin = MPI_Wtime();
            call(op, first, second, block, rank, ranks);
            times[i] = MPI_Wtime() - begin;
            if (i + 1 == WARM_UP) {
                int often = (int)(seconds / (median(times, WARM_UP) + 1e-9));
                often = often < 5 ? 5 : often > MOST ? MOST : often;
                MPI_Bcast(&often, 1, MPI_INT, 0, MPI_COMM_WORLD);
                MPI_Barrier(MPI_COMM_WORLD);
                repetitions = WARM_UP + often;
            }
        }
        double own = median(times + WARM_UP, repetitions - WARM_UP), slowest;
        MPI_Reduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("%s{\"op\":\"%s\",\"bytes\":%zu,\"median_us\":%.3f,\"algbw_GBps\":%.4f}", size == 3 ? "[" : ",", op,
                   elements * 4, slowest * 1e6, elements * 4 / slowest / 1e9);
        }
        free(first);
        free(second);
    }
    if (rank == 0) printf("]\n");
    MPI_Finalize();
    return 0;
}
