//! Self-contained HTML pages: the report of a run, and the page of a plan.
//!
//! A page is one template with a style sheet and a drawing library in JavaScript, which all pages share, and with its own script and
//! data. Rust computes the data; the browser draws them.

use serde_json::Value;

const STYLE: &str = include_str!("../assets/page.css");
const LIBRARY: &str = include_str!("../assets/page.js");

/// The parts in which a page differs from others.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// Title of the browser's tab.
    pub title: &'a str,
    /// Style sheet, after the shared one.
    pub style: &'a str,
    /// Script that draws the page, after the shared library.
    pub script: &'a str,
    /// The library's `data`. Its text may be hostile.
    pub data: &'a Value,
}

impl Page<'_> {
    /// Returns the page as HTML that needs no other file.
    pub fn html(&self) -> String {
        let Self { title, style, script, data } = self;
        format!(
            include_str!("../assets/page.html"),
            title = title.replace('&', "&amp;").replace('<', "&lt;"),
            style = format_args!("{STYLE}{style}"),
            script = format_args!("{LIBRARY}{script}"),
            // In a script element only `</script` and `<!--` are special, and both need this character.
            data = data.to_string().replace('<', "\\u003c"),
        )
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_text_of_a_page_is_markup() {
        let hostile = "</script><script>alert(1)</script><!-- {script} &amp;";
        let data = json!({ "name": hostile });
        let page = Page { title: hostile, style: "", script: "", data: &data }.html();
        assert!(!page.contains("<script>alert") && !page.contains("<!--"), "markup from the data");
        assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (2, 2));
        assert!(page.contains("<title>&lt;/script>&lt;script>"), "the title is escaped");
        let start = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
        let length = page[start..].find("</script>").unwrap();
        assert_eq!(serde_json::from_str::<Value>(&page[start..start + length]).unwrap(), data);
        // The name of a namespace is no link.
        assert!(!page.replace("http://www.w3.org/2000/svg", "").contains("http"), "a link");
    }
}
