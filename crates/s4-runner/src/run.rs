//! The service from its start to its end.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use s4weights::Interrupt;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;
use uuid::Uuid;

use crate::clock::Moment;
use crate::config::Config;
use crate::converter::Unconverted;
use crate::entitlement;
use crate::error::{Error, Result};
use crate::health::{Health, Thread};
use crate::imds::Imds;
use crate::interruption::{notice, watch_spot};
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::queue::{Mode, Queue};
use crate::record::{FILE_GONE, Record, State};
use crate::restores::Restores;
use crate::service::Service;
use crate::staging::Staging;
use crate::stores::Stores;
use crate::watch::{Convert, Watcher};
use crate::worker::{CrashHook, Worker};
use crate::{http, memory, notify, socket};

/// How long threads may take to end after they were asked to.
const END: Duration = Duration::from_secs(5);

/// Parts of the service that the program supplies, and that tests replace.
#[derive(Clone)]
pub struct Hooks {
    /// Called at each named place.
    pub reached: CrashHook,
    /// Names the CUDA devices, or says why there is none.
    pub gpu: Arc<dyn Fn() -> std::result::Result<String, String> + Send + Sync>,
    /// Converts files of the watched folder.
    pub convert: Convert,
}

impl Default for Hooks {
    fn default() -> Self {
        Self {
            reached: Arc::new(|_| {}),
            gpu: Arc::new(devices),
            convert: Arc::new(|_, _| {
                Err(Unconverted::Rejected("files of this type are not supported".into()))
            }),
        }
    }
}

fn devices() -> std::result::Result<String, String> {
    let cuda = s4weights::cuda::Cuda::discover().map_err(|e| e.to_string())?;
    let names: Vec<_> = cuda.devices().iter().map(|d| d.name.clone()).collect();
    if names.is_empty() { Err("no CUDA device".to_owned()) } else { Ok(names.join(", ")) }
}

/// Runs the service until a signal ends it and everything accepted is durable, or time is up. The journal keeps the
/// rest for the next start, and [`Error::NotDurable`] names it. Order of the start: configuration, entitlement,
/// GPU, journal, sockets, `READY=1`.
///
/// # Errors
/// [`Error`]; except for `NotDurable`, nothing listened.
pub fn run(config: Config, hooks: Hooks) -> Result<()> {
    config.check()?;
    memory::give_back();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Error::Internal(format!("cannot start the runtime: {e}")))?;
    let outcome = runtime.block_on(main(config, hooks));
    // Threads that are blocked on a drive or a server are not waited for.
    runtime.shutdown_background();
    outcome
}

async fn main(config: Config, hooks: Hooks) -> Result<()> {
    // Handled from the start: it is only a notice, and by default would kill the process.
    let usr1 = signal(SignalKind::user_defined1());
    let no_client = |e: crate::imds::NoAnswer| Error::Internal(e.to_string());
    let imds = Imds::new(&config.imds).map_err(no_client)?;
    entitlement::decide(&config.entitlement, &imds).await?;
    let engine = engine(&config, &hooks)?;
    let (service, worker) = recover(config, &hooks, engine)?;
    service.health.set_entitled();
    let config = &service.config;
    let unix = socket::bind(&config.socket)?;
    let tcp = listen(&config.http).await?;
    tracing::info!(http = config.http, socket = %config.socket.display(), "listening");
    let threads = start(&service, &worker, &hooks)?;
    let background = background(&service, imds, unix, tcp);
    notify::ready();
    let mut signals = Signals::new(usr1);
    let why = signals.wait(&service).await;
    notify::stopping(&why);
    service.queue.set_mode(Mode::Draining);
    tokio::select! {
        () = drain(&service) => {}
        why = signals.end() => tracing::warn!("{why} again: exiting without waiting"),
    }
    worker.interrupt.stop();
    service.queue.stop();
    background.into_iter().for_each(|task| task.abort());
    join(threads).await;
    // The next start replaces it anyway.
    let _ = std::fs::remove_file(&service.config.socket);
    let records = service.queue.list();
    let failed: Vec<_> = records.iter().filter(|r| r.state == State::Failed).collect();
    if !failed.is_empty() {
        tracing::warn!("failed checkpoints, kept until they are forgotten: {}", named(&failed));
    }
    let left: Vec<_> = records.iter().filter(|r| !r.state.is_final()).collect();
    if left.is_empty() {
        tracing::info!("all that was accepted is durable");
        return Ok(());
    }
    Err(Error::NotDurable { count: left.len(), which: named(&left) })
}

/// The steps of checkpoints and their states, the first of them if there are many.
fn named(records: &[&Record]) -> String {
    const MOST: usize = 20;
    let one = |r: &&Record| format!("step {} ({})", r.step, r.state.name());
    let mut all: Vec<_> = records.iter().take(MOST).map(one).collect();
    if records.len() > MOST {
        all.push(format!("{} more", records.len() - MOST));
    }
    all.join(", ")
}

/// Names the encoder, and the reason for the choice.
fn engine(config: &Config, hooks: &Hooks) -> Result<String> {
    match (hooks.gpu)() {
        Ok(names) => Ok(format!(
            "cpu: the runner encodes on the CPU; trainers encode on {names}, with identical results"
        )),
        Err(why) if config.require_gpu => Err(Error::NoGpu(why)),
        Err(why) => Ok(format!("cpu: {why}")),
    }
}

/// Reads the journal, and cleans up what a killed process left.
fn recover(config: Config, hooks: &Hooks, engine: String) -> Result<(Arc<Service>, Worker)> {
    let (journal, mut records, damaged) = Journal::open(&config.state_dir)?;
    for bad in &damaged {
        tracing::error!(record = bad.name, why = bad.why, "cannot read a journal record");
    }
    let staging = Staging::open(&config.staging())?;
    let known = journal.known_store();
    let stores = Stores::new(config.clone(), staging.clone(), known.clone())
        .map_err(|e| Error::io("read", known.path(), e))?;
    stay_with_store(&config, &journal, &stores, &mut records, damaged.len())?;
    let find = |id: Uuid| records.iter().find(|r| r.id == id);
    // A record that cannot be read may belong to any of the files, so all of them stay.
    let is_known = |id| find(id).is_some() || !damaged.is_empty();
    // The file of a failed checkpoint stays until it is forgotten: it may be the only copy.
    let is_needed = |id| find(id).is_none_or(|r| r.holds_file());
    staging.recover(is_known, is_needed)?;
    for record in records.iter_mut().filter(|r| r.state <= State::Compressed) {
        // The journal may have failed after it had written the record, so that the file was given back.
        let is_there = staging.has(record.id) || staging.take(record.id, record.uid).is_ok();
        if !is_there {
            tracing::error!(id = %record.id, step = record.step, why = FILE_GONE);
            record.state = State::Failed;
            record.error = Some(FILE_GONE.to_owned());
        }
    }
    let queue = Arc::new(Queue::new(journal, records, &Moment::now()));
    let stores = Arc::new(stores);
    let health = Arc::new(Health::default());
    let metrics = Arc::new(Metrics::default());
    let worker = Worker {
        queue: Arc::clone(&queue),
        staging: staging.clone(),
        stores: Arc::clone(&stores),
        health: Arc::clone(&health),
        metrics: Arc::clone(&metrics),
        interrupt: Interrupt::default(),
        reached: Arc::clone(&hooks.reached),
        threads: config.threads,
    };
    let damaged_records = damaged.len();
    let accepting = Mutex::default();
    let service = Service {
        config,
        queue,
        staging,
        stores,
        health,
        metrics,
        engine,
        damaged_records,
        accepting,
        restores: Restores::default(),
        reached: Arc::clone(&hooks.reached),
    };
    Ok((Arc::new(service), worker))
}

/// Refuses to switch to another store while checkpoints of the last one are not durable, or may not be. Otherwise
/// forgets its records, since a checkpoint that is durable there would be taken for durable here.
fn stay_with_store(
    config: &Config,
    journal: &Journal,
    stores: &Stores,
    records: &mut Vec<Record>,
    damaged: usize,
) -> Result<()> {
    let name = config.store_name();
    let before = journal.store().map_err(|e| Error::io("read", &config.state_dir, e))?;
    if before.as_ref().is_some_and(|before| *before != name) {
        let before = before.unwrap_or_default();
        let mut open = records.iter().filter(|r| r.state != State::Durable).count();
        let refused = |what: String| {
            let folder = config.state_dir.display();
            let what = format!("{folder}: {what}, or use another state folder and staging folder");
            Err(Error::Config(what))
        };
        let first = format!(
            "and must not go to {name}: start the runner with {before} until everything is durable or forgotten"
        );
        if open == 0 && damaged > 0 {
            return refused(format!(
                "{damaged} journal record(s) cannot be read (journal/*.damaged), and their checkpoints may not be \
                 durable in {before}: start the runner with {before} until everything is durable, then remove these \
                 files"
            ));
        }
        if open == 0 {
            // The journal may have lost its record.
            match stores.not_durable(records) {
                Ok(found) => open = found,
                Err(e) => {
                    return refused(format!(
                        "the local store cannot be read ({e}); its checkpoints belong in {before} {first}"
                    ));
                }
            }
        }
        if open > 0 {
            return refused(format!(
                "{open} checkpoint(s) are not durable in {before} yet {first}"
            ));
        }
        tracing::warn!(
            before,
            now = name,
            "the store has changed: forgetting the checkpoints that are durable in the previous one"
        );
        stores.clear().map_err(|e| Error::io("clear", &config.staging(), e))?;
        for record in records.drain(..) {
            journal.remove(record.id).map_err(|e| Error::io("clear", &config.state_dir, e))?;
        }
    }
    journal.set_store(&name).map_err(|e| Error::io("write", &config.state_dir, e))
}

async fn listen(address: &str) -> Result<TcpListener> {
    let at = |source| Error::Io { action: "listen on", path: address.to_owned(), source };
    TcpListener::bind(address).await.map_err(at)
}

/// Starts the worker threads.
fn start(service: &Arc<Service>, worker: &Worker, hooks: &Hooks) -> Result<Vec<JoinHandle<()>>> {
    let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let started = std::thread::Builder::new().name(format!("s4w-{name}")).spawn(work);
        started.map_err(|e| Error::Internal(format!("cannot start a thread: {e}")))
    };
    let (compress, upload) = (worker.clone(), worker.clone());
    worker.health.beat(Thread::Compress);
    worker.health.beat(Thread::Upload);
    let mut threads = vec![
        spawn("compress", Box::new(move || compress.compress_all()))?,
        spawn("upload", Box::new(move || upload.upload_all()))?,
    ];
    if let Some(watch) = &service.config.watch {
        let convert = Arc::clone(&hooks.convert);
        let watcher = Watcher::new(watch.clone(), Arc::clone(service), convert);
        threads.push(spawn("watch", Box::new(move || watcher.run()))?);
    }
    Ok(threads)
}

/// Starts the tasks that answer requests, notify systemd and watch for interruptions.
fn background(
    service: &Arc<Service>,
    imds: Imds,
    unix: UnixListener,
    tcp: TcpListener,
) -> Vec<tokio::task::JoinHandle<()>> {
    let shared = || Arc::clone(service);
    let mut tasks = vec![
        tokio::spawn(socket::serve(unix, socket::router(shared()))),
        tokio::spawn(http::serve(tcp, http::router(shared()))),
        tokio::spawn(notify::watchdog(Arc::clone(&service.health))),
    ];
    if service.config.spot {
        let (health, queue) = (Arc::clone(&service.health), Arc::clone(&service.queue));
        tasks.push(tokio::spawn(watch_spot(imds, health, queue)));
    }
    tasks
}

/// The signals that the service handles. `HUP` (the terminal is gone) ends it, as `TERM` and `INT`
/// do. After `USR1`, which batch systems send ahead of the end, the newest checkpoint goes first.
struct Signals(Vec<(&'static str, Signal)>);

const NOTICE: &str = "SIGUSR1";

impl Signals {
    /// `usr1` is handled already.
    fn new(usr1: std::io::Result<Signal>) -> Self {
        let kinds = [
            ("SIGTERM", signal(SignalKind::terminate())),
            ("SIGINT", signal(SignalKind::interrupt())),
            ("SIGHUP", signal(SignalKind::hangup())),
            (NOTICE, usr1),
        ];
        Self(kinds.into_iter().filter_map(|(name, signal)| Some((name, signal.ok()?))).collect())
    }

    /// Waits for a signal; returns its name.
    async fn next(&mut self) -> &'static str {
        poll_fn(|cx| {
            let come = |(name, signal): &mut (&'static str, Signal)| {
                signal.poll_recv(cx).is_ready().then_some(*name)
            };
            self.0.iter_mut().find_map(come).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Waits for a signal that ends the service; returns its name.
    async fn end(&mut self) -> &'static str {
        loop {
            match self.next().await {
                NOTICE => {}
                name => return name,
            }
        }
    }

    /// Waits for a signal that ends the service, or a request to drain; returns which.
    async fn wait(&mut self, service: &Service) -> String {
        let mut changed = service.queue.watch();
        loop {
            tokio::select! {
                name = self.next() => match name {
                    NOTICE => notice(&service.health, &service.queue, "usr1", NOTICE),
                    name => return name.to_owned(),
                },
                _ = changed.changed() => {
                    if service.queue.mode() == Mode::Draining {
                        return "drain".to_owned();
                    }
                }
            }
        }
    }
}

/// Waits until everything is durable or time is up.
async fn drain(service: &Service) {
    let began = Instant::now();
    let open = service.flush(service.config.drain()).await;
    tracing::info!(open, seconds = began.elapsed().as_secs_f64(), "drained");
}

/// Waits for the threads, but not longer than [`END`].
async fn join(threads: Vec<JoinHandle<()>>) {
    let end = Instant::now() + END;
    while Instant::now() < end && !threads.iter().all(JoinHandle::is_finished) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for thread in threads.into_iter().filter(JoinHandle::is_finished) {
        if thread.join().is_err() {
            tracing::error!("a thread panicked");
        }
    }
}
