//! Atomic commit of a checkpoint: a set of files that appears at one instant.
//!
//! ```text
//!   .tmp-step-00000100/            created while holding the directory's lock; leftovers of dead saves are removed first
//!       rank-*.safetensors         each rank: write, fsync, report                    (write_shard)
//!       manifest.json              one rank, after all reports have arrived and cover everything; fsync
//!   fsync the directory
//!   rename to step-00000100        <- the commit
//!   fsync the parent
//! ```
//!
//! A process that dies before the rename leaves a hidden directory that the next save removes. A process that dies
//! after it leaves a complete checkpoint. [`save`] does all of it for a single rank. With several ranks, one calls
//! [`Staging::begin`] and [`Staging::commit`], and each calls [`write_shard`](crate::write_shard) in between.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use lockstep_plan::ParameterRecord;
use serde_json::Value;

use crate::{
    disk::{OneSecondTimeout, notify, run_on_disk},
    error::{CheckpointError, CoverageError},
    files::{DirectoryLock, create_directories, create_file, exchange, sync_directory},
    listing::{SET_ASIDE, staging_of, step_name, sweep},
    manifest::{FORMAT_VERSION, MANIFEST_FILE, Manifest, TensorEntry, TensorKind, config_digest},
    observer::{CommitObserver, CommitPoint},
    shard::{PlannedShard, ShardReport, TensorSlice},
};

/// State of a run that a checkpoint records besides its tensors.
#[derive(Debug, Clone, Default)]
pub struct SaveRequest<'a> {
    /// Optimizer steps taken; they name the directory.
    pub step: u64,
    /// Samples consumed: the state of the data loader.
    pub samples_consumed: u64,
    /// Random seed of the run.
    pub seed: u64,
    /// Level of the CPU kernels that computed the state: see [`Manifest::kernels`].
    pub kernels: Option<String>,
    /// Configuration of the run.
    pub config: Value,
    /// Plan of the run, or null.
    pub plan: Value,
    /// Counters and scalars that are not tensors. Finite floats keep every bit; JSON has no NaN.
    pub state: Value,
    /// Parameters of the model. Each that is trainable and not tied to another must be saved with its global shape.
    pub parameters: &'a [ParameterRecord],
}

/// Saves the state of a single-rank run under `dir` and returns the path of the new checkpoint.
///
/// Fails before it writes anything if `tensors` do not cover each tensor exactly once. Atomically replaces a checkpoint
/// of the same step. After an error all written files are removed and earlier checkpoints remain.
pub fn save(
    dir: &Path,
    request: &SaveRequest<'_>,
    tensors: &[TensorSlice<'_>],
) -> Result<PathBuf, CheckpointError> {
    save_observed(dir, request, tensors, &())
}

/// Saves as [`save`] does, watched by `observer`.
pub fn save_observed(
    dir: &Path,
    request: &SaveRequest<'_>,
    tensors: &[TensorSlice<'_>],
    observer: &dyn CommitObserver,
) -> Result<PathBuf, CheckpointError> {
    let shard = PlannedShard::new(0, tensors)?;
    check_complete(&shard.tensors, request.parameters)?;
    let staging = Staging::begin_observed(dir, request.step, observer)?;
    let report = shard.write(staging.path(), observer)?;
    staging.commit_observed(request, vec![report], observer)
}

/// Save in progress: a hidden directory that is removed if this is dropped without a commit. While it exists, no other
/// save can use the same parent directory.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    step: u64,
    /// Errors of leftovers that could not be deleted.
    leftovers: Vec<CheckpointError>,
    /// Ownership of the directory. `None` while a disk thread uses it, and after such a thread was abandoned.
    claim: Option<StagingDirectory>,
}

/// Staging directory of a save and the lock of its parent. Dropping this removes the directory unless it was committed.
#[derive(Debug)]
struct StagingDirectory {
    dir: PathBuf,
    path: PathBuf,
    step: u64,
    committed: bool,
    #[expect(dead_code, reason = "held until the save is over")]
    lock: DirectoryLock,
}

impl Staging {
    /// Starts a save: creates `dir` if it is missing, removes leftovers of dead saves, and creates the hidden
    /// directory.
    pub fn begin(dir: &Path, step: u64) -> Result<Self, CheckpointError> {
        Self::begin_observed(dir, step, &())
    }

    /// Starts a save as [`Staging::begin`] does, watched by `observer`.
    pub fn begin_observed(
        dir: &Path,
        step: u64,
        observer: &dyn CommitObserver,
    ) -> Result<Self, CheckpointError> {
        let owned = dir.to_owned();
        let open = move || StagingDirectory::take(&owned, step);
        let (claim, leftovers) = run_on_disk(observer, "opening", dir, open)?;
        let staging = Self { path: claim.path.clone(), step, leftovers, claim: Some(claim) };
        notify(observer, CommitPoint::StagingCreated)?;
        Ok(staging)
    }

    /// Returns the staging directory of a save of `step` that another rank has begun in `dir`.
    ///
    /// # Errors
    /// If `dir` cannot be listed.
    pub fn path_in(dir: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
        let (begun, new) = staging_of(dir, step)?;
        Ok(begun.unwrap_or(new))
    }

    /// Returns the errors of leftovers that could not be deleted. They do not affect this save.
    pub fn leftovers(&self) -> &[CheckpointError] {
        &self.leftovers
    }

    /// Returns the directory into which ranks write their files.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Commits the files that `reports` describe. Fails if together they do not cover every tensor exactly once.
    /// `request.step` must be the step given to `begin`.
    pub fn commit(
        self,
        request: &SaveRequest<'_>,
        reports: Vec<ShardReport>,
    ) -> Result<PathBuf, CheckpointError> {
        self.commit_observed(request, reports, &())
    }

    /// Commits as [`Staging::commit`] does, watched by `observer`.
    pub fn commit_observed(
        mut self,
        request: &SaveRequest<'_>,
        reports: Vec<ShardReport>,
        observer: &dyn CommitObserver,
    ) -> Result<PathBuf, CheckpointError> {
        let manifest = self.manifest(request, reports, observer)?;
        self.write_manifest(&manifest, observer)?;
        let path = self.path.clone();
        self.on_disk(observer, "syncing", &path, |claim| sync_directory(&claim.path))?;
        notify(observer, CommitPoint::StagingSynced)?;

        let (target, replaced) = self.on_disk(observer, "renaming", &path, StagingDirectory::rename)?;
        notify(observer, CommitPoint::Renamed)?;
        self.on_disk(observer, "syncing", &target, |claim| sync_directory(&claim.dir))?;
        notify(observer, CommitPoint::ParentSynced)?;
        if let Some(replaced) = replaced {
            // The save has succeeded even if this fails; the next save tries again.
            let remove = move |_: &mut StagingDirectory| {
                drop(fs::remove_dir_all(replaced));
                Ok(())
            };
            drop(self.on_disk(observer, "deleting the one before", &target, remove));
        }
        let bytes: u64 = manifest.files.values().map(|file| file.bytes).sum();
        tracing::debug!(path = %target.display(), files = manifest.files.len(), bytes, "committed a checkpoint");
        Ok(target)
    }

    /// Runs `work` on the claim in a disk thread, as long as `observer` waits for it.
    fn on_disk<T: Send + 'static>(
        &mut self,
        observer: &dyn CommitObserver,
        doing: &'static str,
        path: &Path,
        work: impl FnOnce(&mut StagingDirectory) -> Result<T, CheckpointError> + Send + 'static,
    ) -> Result<T, CheckpointError> {
        let Some(mut claim) = self.claim.take() else {
            let lost = io::Error::other("the save was given up before");
            return Err(CheckpointError::io("write", path)(lost));
        };
        let (claim, result) = run_on_disk(observer, doing, path, move || {
            let result = work(&mut claim);
            Ok((claim, result))
        })?;
        self.claim = Some(claim);
        result
    }

    /// Builds the manifest after checking that the reported files exist and the reports are complete.
    fn manifest(
        &mut self,
        request: &SaveRequest<'_>,
        reports: Vec<ShardReport>,
        observer: &dyn CommitObserver,
    ) -> Result<Manifest, CheckpointError> {
        let path = self.path.join(MANIFEST_FILE);
        if request.step != self.step {
            let reason = format!("step {} cannot be committed as step {}", request.step, self.step);
            return Err(CheckpointError::Manifest { path, reason });
        }
        let expected: Vec<(PathBuf, u64)> =
            reports.iter().map(|report| (self.path.join(&report.file), report.entry.bytes)).collect();
        self.on_disk(observer, "looking at", &path, move |_| {
            expected.into_iter().try_for_each(|(path, expected)| {
                let found = fs::symlink_metadata(&path).map_err(CheckpointError::io("open", &path))?.len();
                if found == expected {
                    return Ok(());
                }
                Err(CheckpointError::FileSize { path, expected, found })
            })
        })?;
        let mut files = BTreeMap::new();
        let mut tensors: Vec<TensorEntry> = Vec::new();
        let mut known = HashMap::new();
        for report in reports {
            files.insert(report.file, report.entry);
            for mut part in report.tensors {
                let index = *known.entry((part.name.clone(), part.kind.clone())).or_insert_with(|| {
                    tensors.push(TensorEntry { slices: Vec::new(), ..part.clone() });
                    tensors.len() - 1
                });
                tensors[index].must_agree(part.dtype, &part.shape)?;
                tensors[index].slices.append(&mut part.slices);
            }
        }
        check_complete(&tensors, request.parameters)?;
        Ok(Manifest {
            format: Manifest::format_name(),
            version: FORMAT_VERSION,
            step: request.step,
            samples_consumed: request.samples_consumed,
            seed: request.seed,
            kernels: request.kernels.clone(),
            config_blake3: config_digest(&request.config),
            config: request.config.clone(),
            plan: request.plan.clone(),
            state: request.state.clone(),
            tensors,
            files,
        })
    }

    fn write_manifest(
        &mut self,
        manifest: &Manifest,
        observer: &dyn CommitObserver,
    ) -> Result<(), CheckpointError> {
        let path = self.path.join(MANIFEST_FILE);
        let bytes = manifest.to_bytes();
        let half = bytes.len() / 2;
        let create = move |claim: &mut StagingDirectory| {
            let path = claim.path.join(MANIFEST_FILE);
            let mut file = create_file(&path, bytes.len() as u64)?;
            file.write_all(&bytes[..half]).map_err(CheckpointError::io("write", &path))?;
            Ok((file, bytes))
        };
        let (mut file, bytes) = self.on_disk(observer, "writing", &path, create)?;
        notify(observer, CommitPoint::ManifestHalfWritten)?;
        let finish = move |claim: &mut StagingDirectory| {
            let path = claim.path.join(MANIFEST_FILE);
            file.write_all(&bytes[half..]).map_err(CheckpointError::io("write", &path))?;
            Ok(file)
        };
        let file = self.on_disk(observer, "writing", &path, finish)?;
        notify(observer, CommitPoint::ManifestWritten)?;
        let sync = move |claim: &mut StagingDirectory| {
            file.sync_all().map_err(CheckpointError::io("sync", &claim.path.join(MANIFEST_FILE)))
        };
        self.on_disk(observer, "syncing", &path, sync)?;
        notify(observer, CommitPoint::ManifestSynced)
    }
}

/// Removes the staging directory unless it was committed. Leaves that to an abandoned thread if the file system does
/// not answer within a second.
impl Drop for Staging {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        if claim.committed {
            return;
        }
        let path = claim.path.clone();
        // If no thread can be started, the claim is dropped here.
        drop(run_on_disk(&OneSecondTimeout, "deleting", &path, move || {
            drop(claim);
            Ok(())
        }));
    }
}

impl StagingDirectory {
    /// Locks `dir`, removes leftovers and creates the hidden directory. Also returns the errors of remaining leftovers.
    fn take(dir: &Path, step: u64) -> Result<(Self, Vec<CheckpointError>), CheckpointError> {
        create_directories(dir)?;
        let lock = DirectoryLock::take(dir)?;
        let leftovers = sweep(dir)?;
        let (_, path) = staging_of(dir, step)?;
        fs::create_dir(&path).map_err(CheckpointError::io("create", &path))?;
        Ok((Self { dir: dir.to_path_buf(), path, step, committed: false, lock }, leftovers))
    }

    /// Renames the directory to its final name. Returns that path, and the new path of a checkpoint that it replaced.
    fn rename(&mut self) -> Result<(PathBuf, Option<PathBuf>), CheckpointError> {
        let target = self.dir.join(step_name(self.step));
        let replaced = self.rename_to(&target)?;
        self.committed = true;
        Ok((target, replaced))
    }

    fn rename_to(&self, target: &Path) -> Result<Option<PathBuf>, CheckpointError> {
        let rename_error = || CheckpointError::io("rename to", target);
        if fs::symlink_metadata(target).is_err() {
            fs::rename(&self.path, target).map_err(rename_error())?;
            return Ok(None);
        }
        if exchange(&self.path, target)? {
            return Ok(Some(self.path.clone()));
        }
        // Without an atomic exchange the old checkpoint moves aside for a moment. If the process dies then, the next
        // sweep restores it.
        let aside = self.dir.join(format!("{SET_ASIDE}{}", step_name(self.step)));
        fs::rename(target, &aside).map_err(rename_error())?;
        if let Err(error) = fs::rename(&self.path, target) {
            // The old checkpoint stays. If even this rename fails, the next save's sweep does it.
            let _ = fs::rename(&aside, target);
            return Err(rename_error()(error));
        }
        Ok(Some(aside))
    }
}

impl Drop for StagingDirectory {
    fn drop(&mut self) {
        if !self.committed {
            // The next save removes what cannot be removed now.
            drop(fs::remove_dir_all(&self.path));
        }
    }
}

/// Checks that every tensor is covered exactly once and every trainable, untied parameter of the model is saved.
fn check_complete(tensors: &[TensorEntry], parameters: &[ParameterRecord]) -> Result<(), CheckpointError> {
    tensors.iter().try_for_each(TensorEntry::check_coverage)?;
    let saved: HashMap<&str, &TensorEntry> = tensors
        .iter()
        .filter(|entry| entry.kind == TensorKind::Parameter)
        .map(|entry| (entry.name.as_str(), entry))
        .collect();
    for record in parameters.iter().filter(|record| record.trainable && record.tie.is_none()) {
        let problem = match saved.get(record.name.as_str()) {
            Some(entry) if entry.shape == record.shape => continue,
            Some(entry) => {
                format!("saved with shape {:?}, but the model has {:?}", entry.shape, record.shape)
            }
            None => "no rank saves it".to_owned(),
        };
        return Err(CheckpointError::Coverage {
            tensor: record.name.clone(),
            kind: TensorKind::Parameter.to_string(),
            source: CoverageError(problem),
        });
    }
    Ok(())
}
