//! What a limit says, and the words for it: `iops=1000,bps-write=50M,iops-max=5000`.
//!
//! Promises: the fields are those of a throttle group of QEMU, with `-` between their parts; a
//! combination that means nothing is refused by name. `Display` prints words that are read again
//! as the same limits.

#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

/// Largest value of a rate: that of QEMU.
const MAX: u64 = 1_000_000_000_000_000;

/// A rate with its bursts. Requests or bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// For each second, over a long time; 0: no limit.
    pub average: u64,
    /// For each second, in a burst; 0: a burst is what a tenth of a second of the average is.
    pub burst: u64,
    /// How long a burst may last, seconds; 0 or 1: a burst is as much as `burst` at once.
    pub burst_seconds: u64,
}

/// Rates of all requests, of those that read, and of those that write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// All requests together.
    pub total: Rate,
    /// Reads.
    pub read: Rate,
    /// Writes, zeroes and discards.
    pub write: Rate,
}

/// The limits of a group. The default has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests per second.
    pub iops: Rates,
    /// Bytes per second.
    pub bps: Rates,
    /// A request that is longer counts as length / `iops_size` requests, bytes; 0: each is one.
    pub iops_size: u64,
}

/// Why words are no limits: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitsError(String);

impl fmt::Display for LimitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LimitsError {}

/// The names of the six rates.
const NAMES: [&str; 6] = ["iops", "iops-read", "iops-write", "bps", "bps-read", "bps-write"];

impl Limits {
    /// Whether no limit is set.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.rates().iter().all(|rate| rate.average == 0)
    }

    /// The six rates in the order of their names: requests, then bytes; total, read, write.
    pub(crate) fn rates(&self) -> [Rate; 6] {
        let of = |rates: &Rates| [rates.total, rates.read, rates.write];
        let ([a, b, c], [d, e, f]) = (of(&self.iops), of(&self.bps));
        [a, b, c, d, e, f]
    }

    /// These limits with the fields that `text` names changed; `none` removes all. A rate of 0 is
    /// no limit, and takes its bursts with it.
    ///
    /// Errors: an unknown field, a value that is no number or out of range, fields that exclude one
    /// another. They name what is wrong.
    pub fn changed(&self, text: &str) -> Result<Limits, LimitsError> {
        if text.trim() == "none" {
            return Ok(Limits::default());
        }
        let mut out = *self;
        for part in text.split(',') {
            let Some((name, value)) = part.split_once('=') else {
                let part = part.escape_debug();
                return wrong(format!("'{part}' is no limit; write NAME=VALUE, as iops=1000"));
            };
            out.set(name.trim(), value.trim())?;
        }
        out.check()?;
        Ok(out)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), LimitsError> {
        if name == "iops-size" {
            self.iops_size = number(name, value)?;
            return Ok(());
        }
        let (base, field) = match name.strip_suffix("-max-length") {
            Some(base) => (base, Field::Length),
            None => match name.strip_suffix("-max") {
                Some(base) => (base, Field::Burst),
                None => (name, Field::Average),
            },
        };
        let Some(rate) = self.rate(base) else {
            return wrong(format!(
                "unknown limit '{}'; known: {{iops,bps}}[-read|-write], each with -max and \
                 -max-length, and iops-size",
                name.escape_debug()
            ));
        };
        let number = number(name, value)?;
        match field {
            Field::Average if number == 0 => *rate = Rate::default(),
            Field::Average => rate.average = number,
            Field::Burst => rate.burst = number,
            Field::Length if number == 0 => {
                return wrong(format!("{name}=0: a burst lasts at least 1 second"));
            }
            Field::Length => rate.burst_seconds = number,
        }
        Ok(())
    }

    fn rate(&mut self, name: &str) -> Option<&mut Rate> {
        Some(match name {
            "iops" | "iops-total" => &mut self.iops.total,
            "iops-read" => &mut self.iops.read,
            "iops-write" => &mut self.iops.write,
            "bps" | "bps-total" => &mut self.bps.total,
            "bps-read" => &mut self.bps.read,
            "bps-write" => &mut self.bps.write,
            _ => return None,
        })
    }

    fn check(&self) -> Result<(), LimitsError> {
        for (rates, name) in [(&self.iops, "iops"), (&self.bps, "bps")] {
            let parts = [rates.read, rates.write];
            if rates.total.average > 0 && parts.iter().any(|rate| rate.average > 0) {
                return wrong(format!(
                    "{name} (total) and {name}-read or {name}-write cannot be limited at the same \
                     time; set one of them to 0"
                ));
            }
        }
        for (rate, name) in self.rates().iter().zip(NAMES) {
            if rate.average == 0 && (rate.burst > 0 || rate.burst_seconds > 0) {
                return wrong(format!("{name}-max needs {name}: a burst is above a limit"));
            }
            if rate.burst > 0 && rate.burst < rate.average {
                return wrong(format!("{name}-max is below {name}: a burst is above the limit"));
            }
            if rate.burst == 0 && rate.burst_seconds > 0 {
                return wrong(format!("{name}-max-length needs {name}-max"));
            }
            if rate.burst_seconds.saturating_mul(rate.burst) > MAX {
                return wrong(format!("{name}-max-length times {name}-max is more than {MAX}"));
            }
        }
        if self.iops_size > 0 && self.iops == Rates::default() {
            return wrong("iops-size needs a limit of iops".to_owned());
        }
        Ok(())
    }
}

enum Field {
    Average,
    Burst,
    Length,
}

fn wrong<T>(text: String) -> Result<T, LimitsError> {
    Err(LimitsError(text))
}

/// A number, with K, M, G or T for powers of 1024.
fn number(name: &str, text: &str) -> Result<u64, LimitsError> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'M')) => (&text[..at], 20),
        Some((at, 'G')) => (&text[..at], 30),
        Some((at, 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let value = digits.parse::<u64>().ok().filter(|_| is_plain);
    let value = value.and_then(|value| value.checked_mul(1 << shift)).filter(|v| *v <= MAX);
    value.ok_or_else(|| {
        let text = text.escape_debug();
        LimitsError(format!("{name}={text}: a limit is a number of 0 to {MAX}, or like 50M"))
    })
}

impl FromStr for Limits {
    type Err = LimitsError;

    /// As [`Limits::changed`] of no limits.
    fn from_str(text: &str) -> Result<Limits, LimitsError> {
        Limits::default().changed(text)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        let mut put = |name: fmt::Arguments<'_>, value: u64| {
            if value == 0 {
                return Ok(());
            }
            write!(f, "{between}{name}={value}")?;
            between = ",";
            Ok(())
        };
        for (rate, name) in self.rates().iter().zip(NAMES) {
            put(format_args!("{name}"), rate.average)?;
            put(format_args!("{name}-max"), rate.burst)?;
            put(format_args!("{name}-max-length"), rate.burst_seconds)?;
        }
        put(format_args!("iops-size"), self.iops_size)?;
        if self.are_none() { f.write_str("none") } else { Ok(()) }
    }
}
