# The image that deploy/kubernetes names: one static binary and nothing else, no shell included.
#
#   docker build -t lockstep:0.1.0 .       # podman and buildah alike
#   docker run --rm -v "$PWD:/work" lockstep:0.1.0 train run.toml
#
# deploy/try-image.sh builds and runs it where no registry can be reached.
FROM rust:1.95-bookworm AS build
# .git stays outside; this tells `lockstep --version` and run.json what was built.
ARG LOCKSTEP_COMMIT=
ENV LOCKSTEP_COMMIT=$LOCKSTEP_COMMIT
WORKDIR /src
COPY . .
RUN deploy/package.sh /out && mkdir -p -m 1777 /out/root/tmp && mkdir -p /out/root/work /out/root/home

FROM scratch
COPY --from=build /out/root/tmp /tmp
COPY --from=build --chown=65532:65532 /out/root/work /work
COPY --from=build --chown=65532:65532 /out/root/home /home/lockstep
COPY --from=build /out/lockstep /usr/local/bin/lockstep
ENV HOME=/home/lockstep PATH=/usr/local/bin
USER 65532:65532
WORKDIR /work
LABEL org.opencontainers.image.title="lockstep" org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["/usr/local/bin/lockstep"]
CMD ["--help"]
