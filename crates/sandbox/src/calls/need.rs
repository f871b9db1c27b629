//! An entry of a list: one system call, the reason for it, and the allowed arguments.
//!
//! Promises: the filter is made of these entries only, and [`Need::allows`] gives the answer that
//! the filter of a running process must give. A filter sees integers, not the memory behind a
//! pointer, so no rule depends on that memory.

use std::fmt;

/// One system call that serving needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its number on this machine.
    pub call: i64,
    /// The constant of libc: `SYS_…`.
    pub constant: &'static str,
    /// The code that makes it, and its purpose.
    pub why: &'static str,
    /// With which arguments: those of one of these sets, each of which is a number of conditions
    /// that all hold. Empty: with any.
    pub arguments: &'static [&'static [Argument]],
}

/// A condition on one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Index of the argument, from 0.
    pub index: u8,
    /// The required value.
    pub is: Is,
}

/// Required value of an argument. All but [`Is::Null`] compare the lower 32 bits only, as the
/// kernel does with an `int`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Is {
    /// One of these.
    In(&'static [u32]),
    /// The bits of `mask` are as in `value`.
    Bits {
        /// Compared bits.
        mask: u32,
        /// Their value.
        value: u32,
    },
    /// No pointer.
    Null,
    /// The number of this process.
    OurPid,
}

impl Argument {
    /// Whether a value meets the condition.
    ///
    /// * `pid`: of the process.
    #[must_use]
    pub fn allows(&self, value: u64, pid: u32) -> bool {
        let low = u32::try_from(value & u64::from(u32::MAX)).unwrap_or_default();
        match self.is {
            Is::In(values) => values.contains(&low),
            Is::Bits { mask, value } => low & mask == value,
            Is::Null => value == 0,
            Is::OurPid => low == pid,
        }
    }
}

impl Need {
    /// The name of the call.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.constant.strip_prefix("SYS_").unwrap_or(self.constant)
    }

    /// Whether the call may be made with these arguments.
    ///
    /// * `pid`: of the process.
    #[must_use]
    pub fn allows(&self, arguments: &[u64; 6], pid: u32) -> bool {
        let holds = |it: &Argument| it.allows(arguments[usize::from(it.index)], pid);
        self.arguments.is_empty() || self.arguments.iter().any(|set| set.iter().all(holds))
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.index + 1;
        match self.is {
            Is::In([one]) => write!(f, "{number} is {one:#x}"),
            Is::In(values) => {
                let all: Vec<String> = values.iter().map(|value| format!("{value:#x}")).collect();
                write!(f, "{number} is one of {}", all.join(" "))
            }
            Is::Bits { mask, value: 0 } => write!(f, "{number} has none of the bits {mask:#x}"),
            Is::Bits { mask, value } => {
                write!(f, "{number} has of the bits {mask:#x} exactly {value:#x}")
            }
            Is::Null => write!(f, "{number} is a null pointer"),
            Is::OurPid => write!(f, "{number} is the own pid"),
        }
    }
}

/// A row of the table in the documents: name, arguments, reason.
impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set =
            |set: &&[Argument]| set.iter().map(Argument::to_string).collect::<Vec<_>>().join(", ");
        let sets: Vec<String> = self.arguments.iter().map(set).collect();
        write!(f, "| `{}` | {} | {} |", self.name(), sets.join("; or "), self.why)
    }
}
