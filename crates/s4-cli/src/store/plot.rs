//! `plot`: size and ratio of each step, and what costs most, as a picture.

use std::collections::BTreeMap;
use std::path::Path;

use s4weights::Target;
use s4weights::store::{Checkpoint, CheckpointStore, State};
use serde::Serialize;

use super::row::Row;
use super::svg::{Anchor, Svg};
use super::{StoreArgs, text};
use crate::error::{Failure, Result};
use crate::{say, to_json};

const WIDTH: f64 = 960.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 24.0;
const INNER: f64 = WIDTH - LEFT - RIGHT;
const SIZES: f64 = 240.0;
const RATIOS: f64 = 120.0;
/// Height of one row in the list of what costs most.
const COST: f64 = 34.0;
/// The most rows of that list.
const COSTS: usize = 10;
/// The most step labels below the bars.
const LABELS: usize = 16;

const BASE: &str = "#1f4e79";
const DELTA: &str = "#6aaed6";
const RAW: &str = "#e3e3e3";
const LINE: &str = "#b8500f";
const INK: &str = "#222222";
const FAINT: &str = "#777777";

/// The data of the picture.
#[derive(Serialize)]
struct Figures {
    store: String,
    checkpoints: Vec<Row>,
    /// What costs most in the newest base and the newest delta, largest first.
    costs: Vec<Cost>,
    costs_of_base: Option<u64>,
    costs_of_delta: Option<u64>,
}

/// Tensors whose names differ in numbers only.
#[derive(Debug, Default, Serialize)]
struct Cost {
    tensors: String,
    raw_bytes: u64,
    base_bytes: Option<u64>,
    delta_bytes: Option<u64>,
}

impl Cost {
    fn largest(&self) -> u64 {
        self.base_bytes.unwrap_or(0).max(self.delta_bytes.unwrap_or(0))
    }
}

/// `plot`
pub(crate) fn plot(args: &StoreArgs, output: &Path, last: usize) -> Result<()> {
    if output.extension().is_none_or(|e| e != "svg") {
        let name = output.display();
        return Err(Failure::Usage(format!(
            "{name}: the output is an SVG file, so its name must end with .svg"
        )));
    }
    let store = args.open_to_read(s4weights::store::StoreOptions::default())?;
    let state = store.state()?;
    let all = state.list();
    let shown = &all[all.len().saturating_sub(last)..];
    if shown.is_empty() {
        return Err(Failure::NotFound(format!("{}: no checkpoints to draw", store.name())));
    }
    let figures = figures(&store, &state, shown)?;
    let mut picture = Target::from(output).open()?;
    picture.write(draw(&figures).as_bytes())?;
    picture.commit()?;
    if args.json {
        return say(&to_json(&figures)?);
    }
    let count = text::count(shown.len(), "checkpoint");
    say(&format!("{}: {count} of {}", output.display(), store.name()))
}

fn figures(store: &CheckpointStore, state: &State, shown: &[&Checkpoint]) -> Result<Figures> {
    let newest = |delta: bool| shown.iter().rev().find(|c| c.base.is_some() == delta);
    let (base, delta) = (newest(false), newest(true));
    let mut costs: BTreeMap<String, Cost> = BTreeMap::new();
    for (checkpoint, is_delta) in [(base, false), (delta, true)] {
        let Some(checkpoint) = checkpoint else { continue };
        for (name, raw, stored) in tensors(store, checkpoint)? {
            let cost = costs.entry(name).or_default();
            cost.raw_bytes = raw;
            *(if is_delta { &mut cost.delta_bytes } else { &mut cost.base_bytes }) = Some(stored);
        }
    }
    let mut costs: Vec<Cost> =
        costs.into_iter().map(|(tensors, cost)| Cost { tensors, ..cost }).collect();
    costs.sort_by_key(|c| std::cmp::Reverse(c.largest()));
    Ok(Figures {
        store: store.name().to_owned(),
        checkpoints: shown.iter().map(|c| Row::new(state, c)).collect(),
        costs,
        costs_of_base: base.map(|c| c.step()),
        costs_of_delta: delta.map(|c| c.step()),
    })
}

/// Raw and stored bytes of a checkpoint's tensors, added up for names that differ in numbers only.
fn tensors(store: &CheckpointStore, checkpoint: &Checkpoint) -> Result<Vec<(String, u64, u64)>> {
    let content = store.load_id(checkpoint.id(), None)?.reader().inspect(false)?;
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for t in &content.tensors {
        // Small tensors share chunks: what one of them takes is unknown, and little.
        let Some(stored) = t.stored else { continue };
        let sum = sums.entry(without_numbers(&t.name)).or_default();
        sum.0 += t.bytes;
        sum.1 += stored;
    }
    Ok(sums.into_iter().map(|(name, (raw, stored))| (name, raw, stored)).collect())
}

/// A name with `*` in the place of each part that is a number.
fn without_numbers(name: &str) -> String {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts = name.split('.').map(|part| if number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

/// An axis from zero to at least `max`: its end, and the distance of its marks.
fn axis(max: f64) -> (f64, f64) {
    let rough = (max / 5.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough);
    let step = step.unwrap_or(rough);
    ((max / step).ceil().max(1.0) * step, step)
}

fn draw(f: &Figures) -> String {
    let costs = &f.costs[..f.costs.len().min(COSTS)];
    let sizes_top = 84.0;
    let ratios_top = sizes_top + SIZES + 70.0;
    let costs_top = ratios_top + RATIOS + 84.0;
    let height = costs_top + COST * costs.len() as f64 + 16.0;
    let mut svg = Svg::new(WIDTH, height);
    svg.text(LEFT, 30.0, 17.0, INK, Anchor::Start, &f.store);
    legend(&mut svg, f);
    sizes(&mut svg, &f.checkpoints, sizes_top);
    ratios(&mut svg, &f.checkpoints, ratios_top);
    dearest(&mut svg, f, costs, costs_top);
    svg.finish()
}

fn legend(svg: &mut Svg, f: &Figures) {
    let mut x = LEFT;
    for (colour, what) in [(BASE, "base"), (DELTA, "delta"), (RAW, "values")] {
        svg.rect(x, 46.0, 12.0, 12.0, colour, None);
        svg.text(x + 17.0, 57.0, 12.0, INK, Anchor::Start, what);
        x += 80.0;
    }
    let bytes: u64 = f.checkpoints.iter().map(|r| r.bytes).sum();
    let raw: u64 = f.checkpoints.iter().map(|r| r.raw_bytes).sum();
    let total = format!(
        "{}: {} for {}, ratio {}",
        text::count(f.checkpoints.len(), "checkpoint"),
        text::bytes(bytes),
        text::bytes(raw),
        text::ratio_text(text::ratio(raw, bytes))
    );
    svg.text(WIDTH - RIGHT, 57.0, 12.0, INK, Anchor::End, &total);
}

/// Draws horizontal lines with labels to the left; returns the end of the axis.
fn grid(svg: &mut Svg, top: f64, height: f64, max: f64, label: impl Fn(f64) -> String) -> f64 {
    let (end, step) = axis(max);
    let mut value = 0.0;
    while value <= end * 1.000_001 {
        let y = top + height * (1.0 - value / end);
        svg.line(LEFT, y, LEFT + INNER, y, "#d5d5d5");
        svg.text(LEFT - 8.0, y + 4.0, 11.0, FAINT, Anchor::End, &label(value));
        value += step;
    }
    end
}

fn sizes(svg: &mut Svg, rows: &[Row], top: f64) {
    let max = rows.iter().map(|r| r.raw_bytes.max(r.bytes)).max().unwrap_or(1) as f64;
    let end = grid(svg, top, SIZES, max, |v| text::bytes(v as u64));
    let slot = INNER / rows.len() as f64;
    let width = (slot * 0.8).min(48.0);
    for (i, r) in rows.iter().enumerate() {
        let x = LEFT + slot * (i as f64 + 0.5) - width / 2.0;
        let title = format!(
            "step {}: {}, {}, {} for {}, ratio {}",
            r.step,
            r.kind_text(),
            text::count(r.hops, "hop"),
            text::bytes(r.bytes),
            text::bytes(r.raw_bytes),
            text::ratio_text(r.ratio)
        );
        let colour = if r.of.is_some() { DELTA } else { BASE };
        for (bytes, colour) in [(r.raw_bytes, RAW), (r.bytes, colour)] {
            let height = SIZES * bytes as f64 / end;
            svg.rect(x, top + SIZES - height, width, height, colour, Some(&title));
        }
    }
    let every = rows.len().div_ceil(LABELS);
    for (i, r) in rows.iter().enumerate().filter(|(i, _)| i % every == 0) {
        let x = LEFT + slot * (i as f64 + 0.5);
        svg.text(x, top + SIZES + 16.0, 11.0, FAINT, Anchor::Middle, &r.step.to_string());
    }
    svg.text(LEFT + INNER / 2.0, top + SIZES + 33.0, 12.0, INK, Anchor::Middle, "step");
}

fn ratios(svg: &mut Svg, rows: &[Row], top: f64) {
    svg.text(LEFT, top - 10.0, 13.0, INK, Anchor::Start, "ratio: values / stored");
    let max = rows.iter().filter_map(|r| r.ratio).fold(1.0, f64::max);
    let end = grid(svg, top, RATIOS, max, |v| format!("{v:.1}"));
    let slot = INNER / rows.len() as f64;
    let mut points = vec![];
    for (i, r) in rows.iter().enumerate() {
        let Some(ratio) = r.ratio else { continue };
        points.push((LEFT + slot * (i as f64 + 0.5), top + RATIOS * (1.0 - ratio / end)));
    }
    svg.polyline(&points, LINE);
    for (x, y) in points {
        svg.dot(x, y, if rows.len() > 100 { 1.5 } else { 3.0 }, LINE);
    }
}

fn dearest(svg: &mut Svg, f: &Figures, costs: &[Cost], top: f64) {
    let step = |what: &str, step: Option<u64>| step.map(|s| format!("{what} (step {s})"));
    let of: Vec<_> =
        [step("the newest base", f.costs_of_base), step("the newest delta", f.costs_of_delta)]
            .into_iter()
            .flatten()
            .collect();
    let title = format!("tensors that take the most space in {}", of.join(" and "));
    svg.text(LEFT, top - 16.0, 13.0, INK, Anchor::Start, &title);
    let max = costs.iter().map(Cost::largest).max().unwrap_or(1).max(1) as f64;
    let names = 360.0;
    let scale = (WIDTH - RIGHT - names - 150.0) / max;
    for (i, cost) in costs.iter().enumerate() {
        let y = top + COST * i as f64;
        let name = shorten(&cost.tensors, 52);
        svg.text(names - 10.0, y + 17.0, 11.0, INK, Anchor::End, &name);
        for (bytes, colour, at) in [(cost.base_bytes, BASE, 0.0), (cost.delta_bytes, DELTA, 13.0)] {
            let Some(bytes) = bytes else { continue };
            let width = (bytes as f64 * scale).max(1.0);
            svg.rect(names, y + at, width, 11.0, colour, Some(&cost.tensors));
            let ratio = text::ratio_text(text::ratio(cost.raw_bytes, bytes));
            let label = format!("{}, ratio {ratio}", text::bytes(bytes));
            svg.text(names + width + 6.0, y + at + 9.5, 10.0, FAINT, Anchor::Start, &label);
        }
    }
}

/// The end of a long name, which says more than its beginning.
fn shorten(name: &str, most: usize) -> String {
    let count = name.chars().count();
    match count > most {
        true => format!("…{}", name.chars().skip(count - most + 1).collect::<String>()),
        false => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_reach_their_values_in_round_steps() {
        for max in [0.0, 1e-3, 1.0, 1.23, 4.99, 5.0, 123_456_789.0] {
            let (end, step) = axis(max);
            assert!(end >= max && end / step < 7.0 && step > 0.0, "{max}: {end} {step}");
        }
    }

    #[test]
    fn names_without_numbers() {
        assert_eq!(without_numbers("a.0.b.12.w1"), "a.*.b.*.w1");
        assert_eq!(shorten("abcdef", 4), "…def");
    }
}
