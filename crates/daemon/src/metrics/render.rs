//! The text.
//!
//! Promises: pure; each family once; any label value is escaped.

use std::fmt::Write as _;

use super::{FAMILIES, Sample};

/// The text of these samples.
pub fn render(samples: &[Sample]) -> String {
    let mut text = String::with_capacity(samples.len() * 96);
    for family in FAMILIES {
        let mut ours = samples.iter().filter(|sample| sample.family == family.name).peekable();
        if ours.peek().is_none() {
            continue;
        }
        let (name, kind) = (family.name, family.kind.word());
        let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {kind}", family.help);
        for sample in ours {
            let _ = write!(text, "{name}{}", sample.suffix);
            labels(&mut text, &sample.labels);
            let _ = writeln!(text, " {}", sample.value);
        }
    }
    text
}

fn labels(text: &mut String, labels: &[(String, String)]) {
    if labels.is_empty() {
        return;
    }
    text.push('{');
    for (number, (name, value)) in labels.iter().enumerate() {
        let comma = if number > 0 { "," } else { "" };
        let name: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let _ = write!(text, "{comma}{name}=\"{value}\"");
    }
    text.push('}');
}
