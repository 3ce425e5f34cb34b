//! Files and checkpoints on an S3 server whose connections are slow, as those to a distant one are.
//!
//! `remote MIB [RATE] [LATENCY] [CALLS]`: the size of the state, the MB/s of one connection (10), the milliseconds
//! before each answer (20), and how often each is done (the fastest counts). "Connections" is how many would take as
//! long if they were always busy: with slow connections it is what counts, on any machine and with any preset.

use std::time::{Duration, Instant};

use s4_benches::adam::{State, sources};
use s4_benches::s3::{Distance, Server};
use s4weights::store::{CheckpointStore, SaveOptions, StorageOptions, StoreOptions};
use s4weights::{ReadOptions, Reader, Source, Target, WriteOptions, Writer};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const ROWS: [&str; 6] =
    ["save a file", "load it", "save a base", "load it", "save a delta", "load it"];

fn main() -> Outcome<()> {
    let usage = "usage: remote MIB [RATE] [LATENCY] [CALLS]";
    let mut arguments = std::env::args().skip(1);
    let mib: usize = arguments.next().ok_or(usage)?.parse()?;
    let rate = arguments.next().map_or(Ok(10.0), |a| a.parse::<f64>())? * 1e6;
    let latency = Duration::from_millis(arguments.next().map_or(Ok(20), |a| a.parse())?);
    let calls: usize = arguments.next().map_or(Ok(3), |a| a.parse())?;
    let server = Server::start_at(Distance { latency, rate })?;
    let pairs = [
        ("endpoint_url", server.url()),
        ("key", "test".into()),
        ("secret", "test".into()),
        ("region", "x".into()),
    ];
    let storage: StorageOptions = pairs.map(|(k, v)| (k.to_owned(), v)).into();

    let values = mib * (1 << 20) / 12;
    let shape = [values as u64];
    let mut state = State::new(values);
    (0..5).for_each(|step| state.step(step));
    let mut best = [(Duration::MAX, 0); ROWS.len()];
    for call in 0..calls {
        let url = format!("s3://bucket/{call}");
        let mut note = |row: usize, start: Instant, stored: u64| {
            best[row] = best[row].min((start.elapsed(), stored));
        };
        let bytes = state.bytes();
        let (file, start) = (format!("{url}/file"), Instant::now());
        let target = Target::Url(file.clone(), storage.clone());
        let mut writer = Writer::create(target, WriteOptions::default())?;
        writer.expect(12 * values as u64);
        writer.write(&sources(&bytes, &shape))?;
        let stored = writer.finish(Default::default())?.bytes_out;
        note(0, start, stored);
        let start = Instant::now();
        let reader = Reader::open(Source::Url(file, storage.clone()), ReadOptions::default())?;
        compare(&reader, &bytes)?;
        note(1, start, stored);

        let options = StoreOptions::default;
        let store = CheckpointStore::create(&url, &storage, options())?;
        // Nothing of what it loads is in its memory.
        let other = CheckpointStore::open(&url, &storage, options())?;
        let mut with_base = 0;
        for step in 0..2 {
            if step == 1 {
                state.step(100 + call as u64);
            }
            let bytes = state.bytes();
            let start = Instant::now();
            let saved = store.save(step, &sources(&bytes, &shape), &SaveOptions::default())?;
            if saved.why_base.is_some() != (step == 0) {
                return Err(format!("step {step}: {:?}", saved.why_base).into());
            }
            let (row, bytes_out) = (2 + 2 * step as usize, saved.report.bytes_out);
            note(row, start, bytes_out);
            // A delta is loaded with its base.
            with_base += bytes_out;
            let start = Instant::now();
            compare(other.load(Some(step))?.reader(), &bytes)?;
            note(row + 1, start, with_base);
        }
    }
    println!(
        "{mib} MiB, {:.0} MB/s for each connection after {latency:?}, the fastest of {calls}",
        rate / 1e6
    );
    for (what, (time, stored)) in ROWS.iter().zip(best) {
        let seconds = time.as_secs_f64();
        let connections = stored as f64 / seconds / rate;
        println!(
            "{what:13} {seconds:7.3} s  {:7.3} GB  {connections:5.1} connections",
            stored as f64 / 1e9
        );
    }
    Ok(())
}

/// Reads all tensors, which have the same size, into new memory.
fn compare(reader: &Reader, expected: &[Vec<u8>]) -> Outcome<()> {
    let mut values: Vec<_> = expected.iter().map(|t| vec![0; t.len()]).collect();
    let names = ["w", "m", "v"].map(|name| reader.find(name));
    let mut wants = vec![];
    for (tensor, to) in names.into_iter().zip(&mut values) {
        wants.push((tensor?, to.as_mut_slice()));
    }
    reader.read_into(&mut wants)?;
    if values == expected { Ok(()) } else { Err("other values came back".into()) }
}
