//! `_core.Store`: a checkpoint store.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use s4weights::StagedFn;
use s4weights::store::{
    CheckOptions, Checkpoint, CheckpointId, CheckpointStore, Retention, Retry, SaveOptions, Saved,
    StorageOptions, StoreOptions, SweepOptions, Swept, Verdict,
};
use serde_json::{Value, json};

use crate::arguments::{contents, parse_roles};
use crate::device::CudaEngine;
use crate::errors::to_value_error;
use crate::object::Sources;
use crate::reader::Reader;
use crate::watch::{Watcher, progress};

/// A store that is open. Calls may come from several threads.
#[pyclass(frozen, module = "s4weights._core")]
pub(crate) struct Store {
    pub(crate) inner: CheckpointStore,
    pub(crate) watcher: Watcher,
}

#[pymethods]
impl Store {
    /// `mode`: `open`, `open_read_only`, `create` or `open_or_create`. `writers`: `many` or `single`.
    #[new]
    #[pyo3(signature = (
        url, mode, *, storage_options, preset, threads, max_chain, max_hops, parent_memory, bandwidth,
        allow_network_fs, timeout, writers
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        py: Python<'_>,
        url: String,
        mode: &str,
        storage_options: StorageOptions,
        preset: &str,
        threads: Option<usize>,
        max_chain: Option<u32>,
        max_hops: Option<u32>,
        parent_memory: Option<usize>,
        bandwidth: Option<u64>,
        allow_network_fs: bool,
        timeout: Option<f64>,
        writers: &str,
    ) -> PyResult<Self> {
        let default = StoreOptions::default();
        let mut requests = default.requests.clone();
        requests.bandwidth = bandwidth;
        requests.allow_network_fs = allow_network_fs;
        requests.writers = writers.parse().map_err(to_value_error)?;
        if let Some(seconds) = timeout {
            let deadline = Duration::try_from_secs_f64(seconds)
                .map_err(|e| PyValueError::new_err(format!("timeout={seconds}: {e}")))?;
            requests.retry = Retry::within(deadline);
        }
        let options = StoreOptions {
            preset: preset.parse().map_err(PyValueError::new_err)?,
            threads,
            max_chain: max_chain.unwrap_or(default.max_chain),
            max_hops: max_hops.unwrap_or(default.max_hops),
            parent_memory: parent_memory.unwrap_or(default.parent_memory),
            requests,
            ..default
        };
        let open = match mode {
            "open" => CheckpointStore::open,
            "open_read_only" => CheckpointStore::open_read_only,
            "create" => CheckpointStore::create,
            "open_or_create" => CheckpointStore::open_or_create,
            other => return Err(PyValueError::new_err(format!("mode {other:?}"))),
        };
        let watcher = Watcher::of(Some(&url));
        let open = || open(&url, &storage_options, options);
        Ok(Self { inner: watcher.run(py, None, open)?, watcher })
    }

    /// Saves a checkpoint; `roles` and `tree` are JSON. Tensors on CUDA devices need an engine; their memory is
    /// read until `staged` is called, that of host tensors until the call returns. With `host_changes`, host
    /// tensors are also read only until `staged` is called. `staging_memory`: bytes that may wait to be uploaded
    /// until then; `None`: no limit. Returns the entry and the report, as JSON.
    #[pyo3(signature = (
        step, sources, *, roles, tree, blobs, metadata, metrics, tags, base, callback, engine,
        staged, host_changes, staging_memory
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords")]
    fn save(
        &self,
        py: Python<'_>,
        step: u64,
        sources: &Sources,
        roles: Option<String>,
        tree: Option<String>,
        blobs: HashMap<String, PyBackedBytes>,
        metadata: BTreeMap<String, String>,
        metrics: BTreeMap<String, f64>,
        tags: BTreeMap<String, String>,
        base: bool,
        callback: Option<Py<PyAny>>,
        engine: Option<Py<CudaEngine>>,
        staged: Option<Py<PyAny>>,
        host_changes: bool,
        staging_memory: Option<usize>,
    ) -> PyResult<String> {
        let list = sources.list();
        let tensors = list.iter().map(|s| s.tensor()).collect::<PyResult<Vec<_>>>()?;
        let (roles, contents) = (parse_roles(roles)?, contents(tree, blobs, metadata)?);
        let staged = staged.map(staged_callback);
        let saved = self.watcher.run(py, callback, || {
            let options = SaveOptions {
                roles,
                contents,
                metrics,
                tags,
                base,
                progress: Some(progress()),
                staged,
                host_changes,
                staging_memory,
                engine: engine.map(|e| Arc::clone(&e.get().0)),
            };
            self.inner.save(step, &tensors, &options)
        })?;
        Ok(saved_json(&saved))
    }

    /// All listed checkpoints, from the oldest to the newest, as JSON.
    fn list(&self, py: Python<'_>) -> PyResult<String> {
        let list = self.watcher.run(py, None, || self.inner.list())?;
        Ok(Value::Array(list.iter().map(entry).collect()).to_string())
    }

    /// The newest checkpoint, as JSON.
    fn latest(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let latest = self.watcher.run(py, None, || self.inner.latest())?;
        Ok(latest.map(|c| entry(&c).to_string()))
    }

    /// Opens a checkpoint.
    fn open(&self, py: Python<'_>, id: &str) -> PyResult<Reader> {
        let id = parse_id(id)?;
        let loaded = self.watcher.run(py, None, || self.inner.load_id(id, Some(progress())))?;
        Ok(Reader::of(loaded.reader().clone(), self.watcher))
    }

    /// Opens a checkpoint without its parent.
    fn open_alone(&self, py: Python<'_>, id: &str) -> PyResult<Reader> {
        let id = parse_id(id)?;
        let reader = self.watcher.run(py, None, || self.inner.load_alone(id, Some(progress())))?;
        Ok(Reader::of(reader, self.watcher))
    }

    /// The index of a checkpoint and its objects, each verified against its hash.
    fn stored_bytes<'py>(
        &self,
        py: Python<'py>,
        id: &str,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<Bound<'py, PyBytes>>)> {
        let id = parse_id(id)?;
        let stored = self.watcher.run(py, None, || self.inner.stored_bytes(id))?;
        let objects = stored.objects.iter().map(|o| PyBytes::new(py, o)).collect();
        Ok((PyBytes::new(py, &stored.index), objects))
    }

    fn pin(&self, py: Python<'_>, id: &str, pinned: bool) -> PyResult<()> {
        let id = parse_id(id)?;
        self.watcher.run(
            py,
            None,
            || if pinned { self.inner.pin(id) } else { self.inner.unpin(id) },
        )
    }

    fn retire(&self, py: Python<'_>, ids: Vec<String>, reason: &str) -> PyResult<usize> {
        let ids = ids.iter().map(|id| parse_id(id)).collect::<PyResult<Vec<_>>>()?;
        self.watcher.run(py, None, || self.inner.retire(&ids, reason))
    }

    /// Lists retired checkpoints again. Returns their entries, as JSON.
    fn unretire(&self, py: Python<'_>, ids: Vec<String>) -> PyResult<String> {
        let ids = ids.iter().map(|id| parse_id(id)).collect::<PyResult<Vec<_>>>()?;
        let listed = self.watcher.run(py, None, || self.inner.unretire(&ids))?;
        Ok(Value::Array(listed.iter().map(entry).collect()).to_string())
    }

    /// Retires the checkpoints that a policy does not keep; returns their ids. `best` lists metric, count and
    /// whether larger is better.
    fn apply_retention(
        &self,
        py: Python<'_>,
        keep_last: Option<usize>,
        keep_every: Option<u64>,
        best: Vec<(String, usize, bool)>,
        protect: Vec<String>,
    ) -> PyResult<Vec<String>> {
        let best = best.into_iter().map(|(metric, count, larger)| s4weights::store::Best {
            metric,
            count,
            larger,
        });
        let protect = protect.iter().map(|id| parse_id(id)).collect::<PyResult<_>>()?;
        let policy = Retention { keep_last, keep_every, best: best.collect(), protect };
        let retired = self.watcher.run(py, None, || self.inner.apply_retention(&policy))?;
        Ok(retired.iter().map(ToString::to_string).collect())
    }

    /// Rewrites a checkpoint as a base. Returns the entry, as JSON.
    fn rebase(&self, py: Python<'_>, id: &str, callback: Option<Py<PyAny>>) -> PyResult<String> {
        let id = parse_id(id)?;
        let new = self.watcher.run(py, callback, || self.inner.rebase(id, Some(progress())))?;
        Ok(entry(&new).to_string())
    }

    /// Deletes data that no listed checkpoint needs. Returns a report of what was done, or with `dry_run` would
    /// be, as JSON.
    fn sweep(
        &self,
        py: Python<'_>,
        grace_s: f64,
        exclusive: bool,
        dry_run: bool,
    ) -> PyResult<String> {
        let grace = Duration::try_from_secs_f64(grace_s).map_err(to_value_error)?;
        let options = SweepOptions { grace, exclusive, dry_run };
        let report = self.watcher.run(py, None, || self.inner.sweep(&options))?;
        let list = |swept: &[Swept]| -> Value { swept.iter().map(swept_json).collect() };
        let all = json!({
            "deleted": list(&report.deleted),
            "deleted_bytes": report.deleted_bytes(),
            "given_up": list(&report.aborted),
            "waiting": list(&report.waiting),
            "failed": report.failed,
            "foreign": report.foreign,
            "dry_run": dry_run,
        });
        Ok(all.to_string())
    }

    /// Checks some checkpoints, or all if `only` is empty. Returns the findings, as JSON.
    fn check(&self, py: Python<'_>, read_data: bool, only: Vec<String>) -> PyResult<String> {
        let only = only.iter().map(|id| parse_id(id)).collect::<PyResult<Vec<_>>>()?;
        let report = self.watcher.run(py, None, || {
            self.inner.check(&CheckOptions { read_data, only, progress: Some(progress()) })
        })?;
        let findings: Vec<_> = (report.findings.iter())
            .map(
                |f| json!({"id": f.checkpoint.map(|c| c.to_string()), "what": f.error.to_string()}),
            )
            .collect();
        let unusable: Vec<_> = (report.unusable.iter())
            .map(|(id, by)| json!({"id": id.to_string(), "needs": by.to_string()}))
            .collect();
        let which = |restores: bool| -> Vec<String> {
            let verdicts = report.verdicts.iter();
            let some = verdicts.filter(|(_, verdict)| (*verdict == Verdict::Restores) == restores);
            some.map(|(id, _)| id.to_string()).collect()
        };
        let all = json!({
            "clean": report.is_clean(),
            "restores": which(true),
            "does_not_restore": which(false),
            "findings": findings,
            "unusable": unusable,
            "checkpoints": report.checkpoints,
            "objects": report.objects,
            "bytes_read": report.bytes_read,
        });
        Ok(all.to_string())
    }

    /// The contents of the store's `repo.json`.
    fn repo(&self) -> PyResult<String> {
        serde_json::to_string(self.inner.repo()).map_err(to_value_error)
    }
}

/// Calls a Python function once values are not needed any more.
pub(crate) fn staged_callback(function: Py<PyAny>) -> StagedFn {
    // If the interpreter is shutting down, nobody is waiting for the call.
    Arc::new(move || {
        Python::try_attach(|py| {
            function.call0(py).map_or_else(|e| e.write_unraisable(py, None), drop);
        });
    })
}

/// The result of a save, as JSON.
pub(crate) fn saved_json(saved: &Saved) -> String {
    let retired: Vec<_> = saved.retired.iter().map(ToString::to_string).collect();
    let all = json!({
        "checkpoint": entry(&saved.checkpoint),
        "report": saved.report,
        "stages": saved.stages,
        "why_base": saved.why_base.as_ref().map(ToString::to_string),
        "retired": retired,
    });
    all.to_string()
}

fn parse_id(text: &str) -> PyResult<CheckpointId> {
    text.parse().map_err(to_value_error)
}

fn entry(c: &Checkpoint) -> Value {
    json!({
        "id": c.id().to_string(),
        "step": c.step(),
        "bytes": c.about.data_len.saturating_add(c.about.manifest_len),
        "raw_bytes": c.about.raw_len,
        "parent": c.base.map(|b| b.to_string()),
        "since_base": c.since_base(),
        "metrics": c.about.metrics,
        "tags": c.about.tags,
        "pinned": c.pinned,
        "time_ms": c.at_ms,
    })
}

fn swept_json(swept: &Swept) -> Value {
    let id = swept.checkpoint.map(|c| c.to_string());
    let why = format!("{:?}", swept.why).to_lowercase();
    json!({"what": swept.what, "id": id, "bytes": swept.bytes, "why": why})
}
