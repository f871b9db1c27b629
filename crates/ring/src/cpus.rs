//! Sets of CPUs, as users and the kernel write them.
//!
//! Promises: pure; what users write wrongly is refused with the reason, and no number is larger
//! than a kernel has. Control path: allocates.

use std::fmt;
use std::str::FromStr;

/// Largest CPU number that a list may name: far more than any kernel is built for (8192), so that a
/// typing error is not a long loop.
const CPU_MAX: usize = 65_535;

/// A set of CPU numbers: ascending, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

/// Why a text is no list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuListError(String);

impl fmt::Display for CpuListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CpuListError {}

impl CpuList {
    /// What a file of the kernel says; parts that make no sense are skipped.
    pub fn of_kernel(text: &str) -> CpuList {
        text.trim().split(',').filter_map(|part| range(part).ok()).flatten().collect()
    }

    /// The numbers, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// Whether a CPU is in it.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The smallest.
    pub fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    /// The only one; `None` when there are none or several.
    pub fn only(&self) -> Option<usize> {
        if let [cpu] = self.0[..] { Some(cpu) } else { None }
    }

    /// Those that `keep` wants.
    #[must_use]
    pub fn filter(&self, keep: impl Fn(usize) -> bool) -> CpuList {
        CpuList(self.iter().filter(|cpu| keep(*cpu)).collect())
    }
}

impl FromIterator<usize> for CpuList {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> CpuList {
        let mut cpus: Vec<usize> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        CpuList(cpus)
    }
}

/// As the kernel and taskset(1) take them: numbers and ranges with commas between them; `10-14:2`
/// is every second CPU of a range, `0-15:2/8` the first two of every eight.
impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<CpuList, CpuListError> {
        if text.trim().is_empty() {
            return Err(CpuListError(String::from("the list of CPUs is empty")));
        }
        let mut cpus = Vec::new();
        for part in text.split(',') {
            cpus.extend(range(part)?);
        }
        Ok(cpus.into_iter().collect())
    }
}

/// As [`CpuList::from_str`] reads it; an empty list is `none`.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let runs = self.0.chunk_by(|before, after| before + 1 == *after);
        for (index, run) in runs.enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [one] => write!(f, "{comma}{one}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// One part of a list.
fn range(part: &str) -> Result<Vec<usize>, CpuListError> {
    let (range, step) = match part.split_once(':') {
        Some((range, step)) => (range, Some(step)),
        None => (part, None),
    };
    let (first, last) = match range.split_once('-') {
        Some((first, last)) => (number(first)?, number(last)?),
        None if step.is_some() => {
            return Err(CpuListError(format!("'{}' has a step and no range", excerpt(part))));
        }
        None => (number(range)?, number(range)?),
    };
    if first > last {
        return Err(CpuListError(format!("the range '{}' runs backwards", excerpt(part))));
    }
    let (used, group) = match step.map(|step| step.split_once('/').unwrap_or(("1", step))) {
        Some((used, group)) => (number(used)?, number(group)?),
        None => (1, 1),
    };
    if used == 0 || used > group {
        return Err(CpuListError(format!("the step of '{}' makes no sense", excerpt(part))));
    }
    Ok((first..=last).filter(|cpu| (cpu - first) % group < used).collect())
}

fn number(text: &str) -> Result<usize, CpuListError> {
    match text.trim() {
        "" => Err(CpuListError(String::from("a CPU number is missing in the list"))),
        text if !text.bytes().all(|byte| byte.is_ascii_digit()) => {
            Err(CpuListError(format!("'{}' is not a CPU number", excerpt(text))))
        }
        text => text.parse().ok().filter(|cpu| *cpu <= CPU_MAX).ok_or_else(|| {
            CpuListError(format!("'{}' is too large for a CPU number", excerpt(text)))
        }),
    }
}

/// The first characters of what a user typed, escaped, for a message.
fn excerpt(text: &str) -> String {
    text.escape_debug().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::CpuList;

    fn list(text: &str) -> Vec<usize> {
        text.parse::<CpuList>().expect(text).iter().collect()
    }

    #[test]
    fn lists_of_users_are_understood() {
        assert_eq!(list("0-3,8,10-14:2"), [0, 1, 2, 3, 8, 10, 12, 14]);
        assert_eq!(list("0-9:2/4"), [0, 1, 4, 5, 8, 9]);
        assert_eq!(list(" 7 , 1-2,2,1\n"), [1, 2, 7]);
        assert_eq!(list("5-5"), [5]);
    }

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "is empty"),
            (" ", "is empty"),
            ("1,,2", "is missing"),
            ("1,", "is missing"),
            ("-3", "is missing"),
            ("3-", "is missing"),
            ("a", "'a' is not a CPU number"),
            ("+1", "'+1' is not a CPU number"),
            ("0x3", "is not a CPU number"),
            ("1-2-3", "is not a CPU number"),
            ("3-1", "runs backwards"),
            ("3:2", "has a step and no range"),
            ("0-3:0", "step of '0-3:0'"),
            ("0-3:3/2", "step of '0-3:3/2'"),
            ("0-3:", "is missing"),
            ("65536", "too large"),
            ("0-99999999999999999999", "too large"),
            ("\u{1b}[1m", "'\\u{1b}[1m' is not a CPU number"),
        ] {
            let error = text.parse::<CpuList>().expect_err(text).to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }

    #[test]
    fn lists_are_written_as_the_kernel_writes_them() {
        for text in ["0-3,8,10,12-13", "7", "0-1,4-5"] {
            assert_eq!(text.parse::<CpuList>().expect(text).to_string(), text);
        }
        assert_eq!(CpuList::default().to_string(), "none");
    }

    #[test]
    fn what_the_kernel_says_is_taken_without_complaints() {
        let read = |text| CpuList::of_kernel(text).iter().collect::<Vec<_>>();
        assert_eq!(read("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(read("\n"), [] as [usize; 0]);
        assert_eq!(read("x,3-,1"), [1]);
    }

    #[test]
    fn the_only_one_is_told_from_several() {
        let only = |text: &str| text.parse::<CpuList>().expect(text).only();
        assert_eq!((only("4"), only("4-5"), CpuList::default().only()), (Some(4), None, None));
    }
}
