/* The few functions of MPI that are used, with its handles in boxes of eight bytes: they are pointers in OpenMPI and numbers in
 * MPICH, so that no other language can name their types. Every function returns MPI's error code. Nothing here waits but
 * `start`, `group` and `finish`. */

#include <mpi.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t box;

_Static_assert(sizeof(MPI_Comm) <= sizeof(box), "a communicator fits a box");
_Static_assert(sizeof(MPI_Request) <= sizeof(box), "a request fits a box");

enum { NUMBERS = 7, OPS = 3 };

/* In the order of NumberType::ALL. Sums of integers are those of unsigned ones, which wrap around. */
static MPI_Datatype types[NUMBERS];
/* By number and op; what MPI has no operation for is set by `operation`. */
static MPI_Op ops[NUMBERS][OPS];

static MPI_Comm comm_in(box b) {
    MPI_Comm comm;
    memcpy(&comm, &b, sizeof comm);
    return comm;
}

static box boxed_comm(MPI_Comm comm) {
    box b = 0;
    memcpy(&b, &comm, sizeof comm);
    return b;
}

static int boxed_request(int code, MPI_Request request, box *b) {
    *b = 0;
    memcpy(b, &request, sizeof request);
    return code;
}

static MPI_Datatype type_of(int number, int op) {
    if (op == 0 && types[number] == MPI_INT64_T) return MPI_UINT64_T;
    if (op == 0 && types[number] == MPI_INT32_T) return MPI_UINT32_T;
    return types[number];
}

int lockstep_mpi_start(int *threads, int *rank, int *size, int *local_size, box *world) {
    int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, threads);
    if (code != MPI_SUCCESS) return code;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Datatype half;
    MPI_Type_contiguous(2, MPI_BYTE, &half);
    MPI_Type_commit(&half);
    MPI_Datatype all[NUMBERS] = {MPI_FLOAT, half, half, MPI_INT64_T, MPI_INT32_T, MPI_UINT32_T, MPI_UINT8_T};
    for (int number = 0; number < NUMBERS; number++) {
        types[number] = all[number];
        ops[number][0] = MPI_SUM;
        ops[number][1] = MPI_MAX;
        ops[number][2] = MPI_MIN;
    }
    MPI_Comm own, local;
    code = MPI_Comm_dup(MPI_COMM_WORLD, &own);
    if (code != MPI_SUCCESS) return code;
    MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN);
    code = MPI_Comm_split_type(own, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local);
    if (code != MPI_SUCCESS) return code;
    MPI_Comm_size(local, local_size);
    MPI_Comm_free(&local);
    MPI_Comm_rank(own, rank);
    MPI_Comm_size(own, size);
    *world = boxed_comm(own);
    return MPI_SUCCESS;
}

int lockstep_mpi_operation(int number, int op, MPI_User_function *function) {
    return MPI_Op_create(function, 1, &ops[number][op]);
}

int lockstep_mpi_group(box world, int count, const int *ranks, int tag, box *comm) {
    MPI_Group all, some;
    MPI_Comm made;
    int code = MPI_Comm_group(comm_in(world), &all);
    if (code != MPI_SUCCESS) return code;
    code = MPI_Group_incl(all, count, ranks, &some);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(comm_in(world), some, tag, &made);
    if (code != MPI_SUCCESS) return code;
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    *comm = boxed_comm(made);
    return MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
}

int lockstep_mpi_send(box comm, const void *data, int bytes, int to, int tag, box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Isend(data, bytes, MPI_BYTE, to, tag, comm_in(comm), &r);
    return boxed_request(code, r, request);
}

/* From any rank, if `from` is negative. */
int lockstep_mpi_receive(box comm, void *data, int bytes, int from, int tag, box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Irecv(data, bytes, MPI_BYTE, from < 0 ? MPI_ANY_SOURCE : from, tag, comm_in(comm), &r);
    return boxed_request(code, r, request);
}

int lockstep_mpi_broadcast(box comm, void *data, int bytes, int root, box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Ibcast(data, bytes, MPI_BYTE, root, comm_in(comm), &r);
    return boxed_request(code, r, request);
}

/* In place, if there is no input; so in all that follow. */
int lockstep_mpi_all_gather(box comm, const void *input, int bytes, void *output, const int *counts, const int *starts,
                            box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Iallgatherv(input ? input : MPI_IN_PLACE, bytes, MPI_BYTE, output, counts, starts, MPI_BYTE,
                               comm_in(comm), &r);
    return boxed_request(code, r, request);
}

int lockstep_mpi_all_reduce(box comm, void *data, int count, int number, int op, box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code =
        MPI_Iallreduce(MPI_IN_PLACE, data, count, type_of(number, op), ops[number][op], comm_in(comm), &r);
    return boxed_request(code, r, request);
}

int lockstep_mpi_reduce(box comm, const void *input, void *output, int count, int number, int op, int root,
                        box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Ireduce(input ? input : MPI_IN_PLACE, output, count, type_of(number, op), ops[number][op], root,
                           comm_in(comm), &r);
    return boxed_request(code, r, request);
}

int lockstep_mpi_reduce_scatter(box comm, const void *input, void *output, const int *counts, int number, int op,
                                box *request) {
    MPI_Request r = MPI_REQUEST_NULL;
    int code = MPI_Ireduce_scatter(input, output, counts, type_of(number, op), ops[number][op], comm_in(comm), &r);
    return boxed_request(code, r, request);
}

/* Which of the requests is the first that is not complete; their number, if all are. */
int lockstep_mpi_test(int count, box *requests, int *first) {
    for (*first = 0; *first < count; ++*first) {
        MPI_Request r;
        int done = 0;
        memcpy(&r, &requests[*first], sizeof r);
        if (r == MPI_REQUEST_NULL) continue;
        int code = MPI_Test(&r, &done, MPI_STATUS_IGNORE);
        boxed_request(code, r, &requests[*first]);
        if (code != MPI_SUCCESS) return code;
        if (!done) break;
    }
    return MPI_SUCCESS;
}

int lockstep_mpi_finish(box *receive) {
    MPI_Request r;
    memcpy(&r, receive, sizeof r);
    if (r != MPI_REQUEST_NULL) {
        MPI_Cancel(&r);
        MPI_Wait(&r, MPI_STATUS_IGNORE);
    }
    return MPI_Finalize();
}

int lockstep_mpi_abort(int code) { return MPI_Abort(MPI_COMM_WORLD, code); }

int lockstep_mpi_text(int code, char *text, int room) {
    char whole[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    MPI_Error_string(code, whole, &length);
    strncpy(text, whole, (size_t)room - 1);
    text[room - 1] = 0;
    return MPI_SUCCESS;
}
