//! The results as JSON, as tables and as a picture.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use crate::lab::Outcome;

/// One way of coding, in seconds; `None`: it did not run.
struct Row {
    name: String,
    encode: Option<f64>,
    decode: Option<f64>,
    ratio: Option<f64>,
}

/// Ways of coding the same bytes, and the ceiling that none of them can exceed.
pub(crate) struct Group {
    title: String,
    dtype: &'static str,
    bytes: u64,
    ceiling: &'static str,
    /// Seconds that the ceiling takes: to encode, to decode.
    limits: [f64; 2],
    rows: Vec<Row>,
}

impl Group {
    pub(crate) fn new(title: &str, dtype: &'static str, bytes: u64, ceiling: &'static str) -> Self {
        Self { title: title.into(), dtype, bytes, ceiling, limits: [f64::NAN; 2], rows: vec![] }
    }

    pub(crate) fn ceilings(&mut self, encode: f64, decode: f64) {
        self.limits = [encode, decode];
    }

    pub(crate) fn row(
        &mut self,
        name: &str,
        encode: Option<f64>,
        decode: Option<f64>,
        ratio: Option<f64>,
    ) {
        self.rows.push(Row { name: name.into(), encode, decode, ratio });
    }

    /// 1e9 bytes of values a second.
    fn rate(&self, seconds: f64) -> f64 {
        self.bytes as f64 / seconds / 1e9
    }

    fn heading(&self) -> String {
        let mib = self.bytes as f64 / f64::from(1 << 20);
        format!("{}: {}, {mib:.0} MiB", self.title, self.dtype)
    }

    /// The group as a Markdown table.
    pub(crate) fn text(&self) -> String {
        let [encode, decode] = self.limits;
        let mut out = format!(
            "### {}\n\n| | encode GB/s | of the ceiling's time | decode GB/s | of its time | ratio |\n\
             |---|---:|---:|---:|---:|---:|\n| {} | {:.1} | 1 | {:.1} | 1 | |\n",
            self.heading(),
            self.ceiling,
            self.rate(encode),
            self.rate(decode)
        );
        for row in &self.rows {
            let cells = |seconds: Option<f64>, limit: f64| match seconds {
                Some(s) => format!("{:.1} | {:.3}", self.rate(s), s / limit),
                None => "- | -".into(),
            };
            let ratio = row.ratio.map_or_else(|| "-".into(), |r| format!("{r:.4}"));
            let (e, d) = (cells(row.encode, encode), cells(row.decode, decode));
            // Writing into a string cannot fail.
            let _ = writeln!(out, "| {} | {e} | {d} | {ratio} |", row.name);
        }
        out
    }

    fn json(&self) -> Value {
        let rows = self.rows.iter().map(|r| {
            json!({"name": r.name, "encode_s": r.encode, "decode_s": r.decode, "ratio": r.ratio})
        });
        json!({
            "title": self.title,
            "dtype": self.dtype,
            "bytes": self.bytes,
            "ceiling": {
                "name": self.ceiling,
                "encode_s": self.limits[0],
                "decode_s": self.limits[1],
            },
            "rows": rows.collect::<Vec<_>>(),
        })
    }
}

/// Writes `gpu.json`, `gpu.md` and `gpu.svg`.
pub(crate) fn write(
    folder: &Path,
    machine: &str,
    missing: Option<&str>,
    groups: &[Group],
) -> Outcome<()> {
    std::fs::create_dir_all(folder)?;
    let all: Vec<_> = groups.iter().map(Group::json).collect();
    let json = json!({"machine": machine, "nvcomp_missing": missing, "groups": all});
    std::fs::write(folder.join("gpu.json"), format!("{json:#}\n"))?;
    let mut text = format!(
        "# GPU\n\n{machine}. Rates count bytes of values (1e9 a second); kernels by device events, whole \
         paths by the clock, medians. The values are weights of a training run, repeated. Made by \
         `cargo xtask bench --gpu`.\n\n"
    );
    if let Some(why) = missing {
        text += &format!("nvCOMP was not measured: {why}\n\n");
    }
    for group in groups {
        text += &group.text();
        text.push('\n');
    }
    std::fs::write(folder.join("gpu.md"), text.trim_end().to_owned() + "\n")?;
    std::fs::write(folder.join("gpu.svg"), picture(machine, groups))?;
    Ok(())
}

/// Layout of the picture, in pixels.
const LEFT: f64 = 330.0;
const WIDTH: f64 = 420.0;
const BAR: f64 = 9.0;
const ROW: f64 = 26.0;

/// An SVG with bars for each group and dashed lines for its ceilings: longer is faster.
fn picture(machine: &str, groups: &[Group]) -> String {
    let mut body = String::new();
    let mut y = 52.0;
    for group in groups {
        y = panel(&mut body, group, y) + 18.0;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 {y}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"14\">{}</text>\n\
         <text x=\"12\" y=\"38\"><tspan fill=\"#1f6fb2\">encode</tspan>, \
         <tspan fill=\"#d9822b\">decode</tspan>, GB/s of values; dashed: the ceiling</text>\n\
         {body}</svg>\n",
        escaped(machine)
    )
}

fn panel(body: &mut String, group: &Group, top: f64) -> f64 {
    let fastest = group.limits.iter().copied().fold(f64::INFINITY, f64::min);
    let rows = group.rows.iter().flat_map(|r| [r.encode, r.decode]).flatten();
    let fastest = rows.fold(fastest, f64::min);
    let scale = |seconds: f64| WIDTH * fastest / seconds;
    let mut y = top + 14.0;
    // Writing into a string cannot fail.
    let _ = writeln!(
        body,
        "<text x=\"12\" y=\"{y}\" font-weight=\"bold\">{} (ceiling: {})</text>",
        escaped(&group.heading()),
        escaped(group.ceiling)
    );
    y += 8.0;
    let bottom = y + ROW * group.rows.len() as f64;
    for row in &group.rows {
        let _ = writeln!(body, "<text x=\"12\" y=\"{}\">{}</text>", y + 14.0, escaped(&row.name));
        for (i, (seconds, color)) in
            [(row.encode, "#1f6fb2"), (row.decode, "#d9822b")].into_iter().enumerate()
        {
            let Some(seconds) = seconds else { continue };
            let (at, long) = (y + i as f64 * (BAR + 1.0), scale(seconds));
            let _ = writeln!(
                body,
                "<rect x=\"{LEFT}\" y=\"{at}\" width=\"{long:.1}\" height=\"{BAR}\" fill=\"{color}\"/>\
                 <text x=\"{:.1}\" y=\"{}\" font-size=\"9\">{:.0}</text>",
                LEFT + long + 4.0,
                at + 8.0,
                group.rate(seconds)
            );
        }
        y += ROW;
    }
    for (seconds, color) in group.limits.into_iter().zip(["#1f6fb2", "#d9822b"]) {
        let x = LEFT + scale(seconds);
        let _ = writeln!(
            body,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{bottom}\" stroke=\"{color}\" \
             stroke-dasharray=\"4 3\"/>",
            top + 18.0
        );
    }
    bottom
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group() -> Group {
        let mut group = Group::new("kernels", "bf16", 1 << 30, "copy");
        group.ceilings(1e-3, 2e-3);
        group.row("a <b>", Some(2e-3), Some(4e-3), Some(1.5));
        group.row("absent", None, None, None);
        group
    }

    #[test]
    fn rates_and_shares_of_the_ceiling_stand_in_the_table() {
        let text = group().text();
        assert!(text.contains("| a <b> | 536.9 | 2.000 | 268.4 | 2.000 | 1.5000 |"), "{text}");
        assert!(text.contains("| absent | - | - | - | - | - |"), "{text}");
    }

    #[test]
    fn files_are_written_and_the_picture_is_closed() {
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path(), "a & b", Some("none"), &[group()]).expect("written");
        let read = |name| std::fs::read_to_string(dir.path().join(name)).expect("written");
        let json: Value = serde_json::from_str(&read("gpu.json")).expect("JSON");
        assert_eq!(json["groups"][0]["rows"][0]["encode_s"], 2e-3);
        let svg = read("gpu.svg");
        assert!(svg.contains("a &amp; b") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 1 + 2);
        assert!(read("gpu.md").contains("nvCOMP was not measured: none"));
    }
}
